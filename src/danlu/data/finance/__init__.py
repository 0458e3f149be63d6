"""The embedded default data set: bilingual questions about money in a closed fictional world.

A demo must prove something on data that nobody had to download. These questions have answers that arithmetic settles,
in English and Chinese, and a test that a model cannot pass by recalling its training questions: products and wordings
of the test are new. The world is invented, so no answer can be known beforehand and none can embarrass a real bank.

Files: `dice` (draws that are the same everywhere), `world` (products and their terms), `templates` (wordings),
`questions` (one function a task), `build` (splits, checks, files, manifest).

Tasks: ``lookup`` reads a term, ``fee_sum`` adds two or three fees, ``threshold`` compares a term with a bound (half
yes, half no), ``interest`` computes simple interest, ``clause_comparison`` names the better of two institutions,
``not_stated`` asks for terms that half of its passages leave out, ``closed_lookup`` asks without a passage for facts
that only documents state.

Answers are short and show their working before the marker ``=>``; only what follows it is compared. Chance matters as
much as the majority baseline: naming either institution is right half of the time in ``clause_comparison``, although no
single answer is frequent there.
"""

from danlu.data.finance.build import write_finance

__all__ = ["write_finance"]
