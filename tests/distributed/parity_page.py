"""Measures every layout and writes docs/parity.md and docs/zh/parity.md: ``python -m distributed.parity_page``.

The pages are this file's words around one table; nobody edits them by hand, and `tests/docs/test_parity_page.py` holds
them to that.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; ranks inherit it

import torch

from distributed.parity_layouts import LAYOUTS, Bench, Deviation, Layout
from distributed.pool import RankPool

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMANDS = """```bash
danlu doctor parity new.toml old.toml
danlu doctor parity new.toml old.toml --steps 20 --nproc-a 8 --nproc-b 1 --tolerance 1e-4 --json
```"""
HOW = """```bash
PYTHONPATH=tests .venv/bin/python -m distributed.parity_page
```"""

ENGLISH = """# Parity of layouts

A layout decides how fast a training is and whether it fits, never what comes out. In fp32, every layout below gives the losses and the final weights of one process to 1e-5, gradient norms and AdamW's moments to 1e-4.

## Compare two configs of your own

{commands}

Both configs are trained for a few steps (10 unless `--steps` says otherwise) from the same seed, on ranks of this machine and in temporary folders; your run folders are not touched. Losses, gradient norms and final weights are then compared, B being what A is measured by. The table names the largest distance and where it is, the first step and the first parameter beyond what is allowed.

- The number of ranks is the product of the config's degrees, an unset one being 1. Where a degree is -1, give `--nproc-a` or `--nproc-b`.
- `--tolerance` (1e-5) is for losses and weights; gradient norms may differ ten times as much. It is made for fp32: a config in bf16 compared with one in fp32 differs by about 1e-2.
- Exit code 0: the same training. 1: a distance beyond the tolerance, or a training that failed. 2: the configs do not train the same thing in any layout; the message lists the keys that differ. Model, data, seed, global batch, optimizer and schedule must be equal, and `model.dropout` 0, because every rank draws masks of its own.
- Layout, micro-batch, precision, loader and logging may differ.
- A warm-up longer than the comparison is cut to its length, in both.

## What was measured

Models of two layers in six families and one with experts: key heads shared by several query heads or by all, tied and untied tables, learned and rotary positions, biases, head norms, a sliding window of 4 tokens, vocabularies of 65 and 67 rows that no number of ranks divides, key heads fewer than ranks. 20 steps of AdamW, with a warm-up and with clipping at 0.5, which most steps exceed; 28 rows of one to three documents of uneven length in batches of 8, so that every fourth step is short and the epochs' edges lie inside. Gloo on one CPU machine.

A loss deviates by the largest |a / b - 1| of the 20 steps, weights by the largest |a - b| / |b| of a parameter in the Euclidean norm, b being one process's. What is left are other orders of summation.

Biases of keys are left out of the comparison of weights. A vector added to every key adds the same number to all scores of a query, and softmax does not see it: the gradient of such a bias is zero with learned positions, and nearly so in the slowly turning dimensions of rotary ones. What remains is rounding noise, which AdamW divides by its own size; two orders of summation then move the bias differently, on one process with accumulation too, and the model computes the same. Their gradients are compared instead, in one step, to 1e-6.

{how}

{facts}

{table}
"""

CHINESE = """# 各种布局的一致性

布局决定训练有多快、放不放得下，不决定训练出什么。fp32 下，下表每种布局的损失和最终权重与单进程相差不超过 1e-5，梯度范数和 AdamW 的动量不超过 1e-4。

## 比较你自己的两份配置

{commands}

两份配置用同一个种子各训练几步（默认 10 步，可用 `--steps` 改），在本机启动 rank，写入临时目录，不碰你的运行目录。随后以 B 为基准，比较损失、梯度范数和最终权重。表中给出最大偏差及其位置，以及最先超限的那一步和那个参数。

- rank 数是配置里各并行度的乘积，没写的算 1。某个并行度为 -1 时，用 `--nproc-a` 或 `--nproc-b` 给出。
- `--tolerance`（1e-5）管损失和权重；梯度范数放宽到十倍。默认值针对 fp32：bf16 与 fp32 的配置相比，偏差约为 1e-2。
- 退出码 0：是同一个训练。1：偏差超限，或训练失败。2：两份配置无论怎样布局都不是同一个训练，错误信息列出不同的键。模型、数据、种子、全局批、优化器和学习率计划必须相同，`model.dropout` 必须为 0，因为每个 rank 的掩码是各自抽取的。
- 布局、微批、精度、加载器和日志可以不同。
- 预热比比较的步数还长时，两边都截到该步数。

## 测了什么

两层的小模型，六个家族外加一个带专家的：键头由若干或全部查询头共用、词表绑定与不绑定、可学习位置与旋转位置、偏置、头内归一化、4 个 token 的滑动窗口、任何 rank 数都除不尽的 65 行和 67 行词表、键头比 rank 少。AdamW 训练 20 步，有预热，裁剪阈值 0.5，多数步都会触发；28 行，每行一到三篇长短不一的文档，每批 8 行，因此每四步有一个短步，轮次的边界落在其中。单台 CPU 机器，gloo。

损失的偏差取 20 步中最大的 |a / b - 1|；权重的偏差取所有参数中最大的 |a - b| / |b|（欧几里得范数），b 来自单进程。剩下的只是求和顺序的不同。

键的偏置不参与权重比较。给所有键加上同一个向量，只会让某个查询的所有分数加上同一个数，softmax 看不见：可学习位置下这个偏置的梯度为零，旋转位置下在转得慢的维度上也几乎为零。剩下的是舍入噪声，而 AdamW 会把它除以自身的大小；于是两种求和顺序（单进程做梯度累积也算）会把这个偏置推向不同的地方，模型算出来的却一样。对它们改为比较一步的梯度，精确到 1e-6。

{how}

{facts}

{table}
"""


def table(rows: Mapping[Layout, Deviation], head: Sequence[str]) -> str:
    """Return the Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|"]
    for layout, deviation in rows.items():
        words = layout.name.partition(": ")[2]
        numbers = f"{deviation.loss:.1e} | {deviation.weights:.1e}"
        lines.append(f"| {layout.family} | {layout.ranks} | `{words}` | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write."""
    rows: dict[Layout, Deviation] = {}
    pool = RankPool()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pool, Path(folder))
        for layout in LAYOUTS:
            rows[layout] = bench.measure(layout)
            sys.stderr.write(f"{layout.name}: {rows[layout]}\n")
    pool.close()
    bad = [layout.name for layout, deviation in rows.items() if not deviation.within]
    if bad:
        raise SystemExit(f"beyond the tolerance, nothing written: {bad}")
    date, version = datetime.date.today().isoformat(), torch.__version__.partition("+")[0]
    pages = [
        (DOCS, ENGLISH, f"{date}, torch {version}:", ("family", "ranks", "layout", "loss", "weights")),
        (DOCS / "zh", CHINESE, f"{date}，torch {version}：", ("家族", "rank 数", "布局", "损失", "权重")),
    ]
    for path, words, facts, head in pages:
        text = words.format(commands=COMMANDS, how=HOW, facts=facts, table=table(rows, head))
        (path / "parity.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
