"""Layer 5: reports for people. `read` reads what is there, `chart` and `scores` plan, `write` makes the page."""

from danlu.report.read import read_pipeline
from danlu.report.scores import score_table
from danlu.report.write import write_report

__all__ = ["read_pipeline", "score_table", "write_report"]
