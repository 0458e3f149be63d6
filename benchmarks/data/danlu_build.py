"""danlu's side: what `danlu data build` does, timed without the imports. Prints one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import time

from danlu.base.log import setup_log
from danlu.config.data_build import DataBuild
from danlu.data.build import build


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("inputs", "tokenizer", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--row", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    options = parser.parse_args()
    setup_log()
    config = DataBuild(
        inputs=options.inputs,
        output=options.output,
        tokenizer=options.tokenizer,
        sequence_length=options.row,
        form="text",
        packing="chunk",
        num_workers=options.processes,
        bytes_per_shard=max(2**20, os.path.getsize(options.inputs) // (4 * options.processes)),
    )
    began = time.perf_counter()
    manifest = build(config, progress=False)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "tokens": manifest["num_tokens"]}))


if __name__ == "__main__":
    main()
