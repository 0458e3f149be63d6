"""The peer's side: the usual recipe with `datasets`, timed without the imports. Prints one JSON object.

jsonl -> `map` with the fast tokenizer in batches -> `map` that joins the documents of a batch and cuts rows of equal
length -> `save_to_disk`. The same tokenizer file, the same end-of-text token after each document, as many processes.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import chain
from typing import Any

from datasets import disable_progress_bars, load_dataset
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("inputs", "tokenizer", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--row", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    options = parser.parse_args()
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    end, row = tokenizer.eos_token_id, options.row

    def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": [[*document, end] for document in ids]}

    def cut(batch: dict[str, Any]) -> dict[str, Any]:
        stream = list(chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [stream[start : start + row] for start in range(0, len(stream), row)]}

    began = time.perf_counter()
    data = load_dataset("json", data_files=options.inputs, split="train", cache_dir=f"{options.output}/cache")
    data = data.map(tokenize, batched=True, remove_columns=data.column_names, num_proc=options.processes)
    data = data.map(cut, batched=True, num_proc=options.processes)
    data.save_to_disk(f"{options.output}/rows", num_proc=options.processes)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "tokens": sum(len(ids) for ids in data["input_ids"])}))


if __name__ == "__main__":
    main()
