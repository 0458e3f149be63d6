"""The report: complete, self-contained, equal to its inputs, safe to open."""

import itertools
import json
import math
import re
from html.parser import HTMLParser

import pytest

from danlu.base.errors import UserError
from danlu.report import read_pipeline, score_table, write_report
from danlu.report.chart import MAX_POINTS, format_number, plan_chart, plan_ticks, thin

VOID = {"meta", "br", "hr", "img", "input", "link"}
ATTACK = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Checks nesting and collects text, tags and attributes."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def rate(correct, total):
    return {
        "correct": correct,
        "total": total,
        "value": correct / total,
        "low": max(0, correct / total - 0.07),
        "high": min(1, correct / total + 0.06),
    }


def score(name, correct, total=100, majority=0.1):
    return {
        "name": name,
        "questions": total,
        "strict": rate(correct, total),
        "normalized": rate(min(total, correct + 1), total),
        "majority": rate(round(majority * total), total),
    }


def evaluation(correct):
    tasks = {"lookup": 0.07, "fee_sum": 0.1, "threshold": 0.5}
    return {
        "model": "run",
        "step": 7,
        "held_out": {"loss": 1.25, "perplexity": math.exp(1.25), "bits_per_byte": 0.4321, "tokens": 1234.0, "rows": 9},
        "questions": {
            "file": "data/test.jsonl",
            "num_in_file": 600,
            "num_asked": 600,
            "sample_seed": None,
            "majority_from": "data/train.jsonl",
            "prompts_too_long": 0,
            "answers_without_end": 0,
            "all": score("all", 3 * correct, 300, 0.2),
            "tasks": [score(name, correct, 100, share) for name, share in tasks.items()],
            "languages": [score("en", correct), score("zh", correct)],
        },
    }


def write_run(folder, *, steps=40, config='[train]\noutput = "runs/x"\n', environment=True):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config, encoding="utf-8")
    records = []
    for step in range(1, steps + 1):
        records.append(
            {
                "step": step,
                "loss": 0.7 + 5.3 * math.exp(-step / (steps / 5)) + 0.2 * math.sin(step * 1.7),
                "grad_norm": 1 + 1 / step,
                "lr": 1e-3 * min(1, step / 10) * (1 - step / (steps + 1)),
                "valid_tokens": 500,
                "tokens_seen": 1000 * step,
                "tokens_per_second": 20000 + 900 * math.sin(step),
                "tokens_per_second_per_gpu": 10000,
                "mfu": None,
                "hfu": None,
                "peak_memory_bytes": 2**29 + step * 2**18,
                "data_wait_seconds": 0.001,
                "step_seconds": 0.05,
                "skipped": False,
            }
        )
        if step % (steps // 4) == 0:
            records.append({"step": step, "eval_loss": 1 + 4 * math.exp(-step / 20), "eval_rows": 9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if environment:
        machine = {"torch": "2.13.0", "world_size": 2, "device": "cpu"}
        (folder / "environment.json").write_text(json.dumps(machine), encoding="utf-8")
    return records


def write_pipeline(folder, **options):
    write_run(folder / "model", **options)
    stages = [
        ("data", "data", "done", {"num_samples": 120, "num_rows": 30}),
        ("before", "eval", "done", evaluation(2)),
        ("model", "train", "done", {"step": 40, "first_loss": 6.0, "last_loss": 0.7}),
        ("after", "eval", "done", evaluation(95)),
        ("export", "export", "failed", None),
    ]
    entries = []
    for name, kind, status, result in stages:
        (folder / name).mkdir(exist_ok=True)
        if kind == "eval":
            (folder / name / "eval.json").write_text(json.dumps(result), encoding="utf-8")
        entries.append(
            {
                "name": name,
                "kind": kind,
                "status": status,
                "seconds": 65.0,
                "folder": name,
                "key": "0",
                "result": result,
            }
        )
    document = {"name": "a demo", "stages": entries}
    (folder / "pipeline.json").write_text(json.dumps(document), encoding="utf-8")
    return document


def test_the_page_is_well_formed_and_asks_for_nothing_outside(tmp_path):
    """Every tag is closed in order; there is no script, no URL, no file reference."""
    write_pipeline(tmp_path)
    html = write_report(tmp_path).read_text("utf-8")
    page = Page(html)
    assert not re.search(r"https?:|url\(|@import|//[a-z]", html)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not {"src", "href", "srcset", "data", "action"} & {name for name, _ in page.attributes}
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_the_numbers_shown_are_those_of_the_files(tmp_path):
    """Losses, counts, intervals and stage times appear as the inputs have them."""
    document = write_pipeline(tmp_path)
    records = write_run(tmp_path / "model")
    page = Page(write_report(tmp_path).read_text("utf-8"))
    last = [record for record in records if "loss" in record][-1]
    held_out = [record for record in records if "eval_loss" in record][-1]
    assert f"training loss {format_number(last['loss'])}" in page.text
    assert f"held-out loss {format_number(held_out['eval_loss'])}" in page.text
    assert "tokens seen 40,000" in page.text
    assert f"{last['peak_memory_bytes'] / 2**30:.2f} GiB" in page.text
    for stage in document["stages"]:
        assert f"{stage['name']} {stage['kind']} {stage['status']} 1 min 05 s" in page.text
    for correct in (2, 95):
        strict = rate(correct, 100)
        assert f"{strict['value']:.3f} [{strict['low']:.3f}, {strict['high']:.3f}]" in page.text
    assert "fee_sum 100 0.100 0.020" in page.text
    assert "1.2500 3.49 0.4321 1,234" in page.text


def test_the_loss_curve_goes_through_every_logged_step(tmp_path):
    """A short run is drawn without thinning: hovering shows each step's loss."""
    records = [record for record in write_run(tmp_path) if "loss" in record]
    html = write_report(tmp_path).read_text("utf-8")
    for record in records:
        assert f"step {record['step']}\ntraining: {record['loss']:.6g}" in html


def test_values_of_a_config_cannot_become_markup(tmp_path):
    """Scripts in config values, stage names, environment and scores stay text."""
    config = f"[train]\noutput = '''{ATTACK}'''\n"
    document = write_pipeline(tmp_path, config=config)
    document["name"] = ATTACK
    document["stages"][0]["result"] = {"folder": ATTACK}
    (tmp_path / "pipeline.json").write_text(json.dumps(document), encoding="utf-8")
    result = evaluation(5)
    result["questions"]["file"] = result["questions"]["tasks"][0]["name"] = ATTACK
    (tmp_path / "after" / "eval.json").write_text(json.dumps(result), encoding="utf-8")
    (tmp_path / "model" / "environment.json").write_text(json.dumps({ATTACK: ATTACK}), encoding="utf-8")
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("alert('x')") >= 5


def test_what_is_missing_is_said(tmp_path):
    """No metrics, no evaluation, no environment, a failed stage: each is a sentence, and no chart is drawn."""
    (tmp_path / "config.toml").write_text("[model]\n", encoding="utf-8")
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert "No training step was logged" in page.text
    assert "No evaluation" in page.text
    assert "environment of the run was not recorded" in page.text
    assert "svg" not in page.tags
    whole = tmp_path / "pipeline"
    write_pipeline(whole, environment=False)
    (whole / "after" / "eval.json").unlink()
    page = Page(write_report(whole).read_text("utf-8"))
    assert "Stage export (export) is not done: failed." in page.text
    assert "Stage after is done but its eval.json is gone." in page.text


def test_a_run_killed_in_the_middle_of_a_line_still_has_a_report(tmp_path):
    """A cut-off record is left out and counted; values that are null break the line and are not drawn as zero."""
    records = write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    bad = {**records[0], "step": 41, "loss": None}
    path.write_text(path.read_text("utf-8") + json.dumps(bad) + "\n" + '{"step": 42, "lo', encoding="utf-8")
    (tmp_path / "eval.json").write_text("{", encoding="utf-8")
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert "1 lines of metrics.jsonl could not be read" in page.text
    assert "eval.json cannot be read" in page.text
    assert "training loss not finite" in page.text


def test_one_step_makes_no_curve(tmp_path):
    """A run of a single step shows its numbers and draws nothing."""
    write_run(tmp_path, steps=4)
    lines = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    (tmp_path / "metrics.jsonl").write_text(lines[0] + "\n", encoding="utf-8")
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert "tokens seen 1,000" in page.text
    assert "svg" not in page.tags


def test_how_answers_were_compared_is_said(tmp_path):
    """A marker, a sample and evaluations of different questions are notes under the table."""
    write_pipeline(tmp_path)
    result = evaluation(3)
    result["questions"] |= {"num_asked": 300, "sample_seed": 0, "answer_marker": "=>"}
    for name in ("before", "after"):
        (tmp_path / name / "eval.json").write_text(json.dumps(result), encoding="utf-8")
    text = Page(write_report(tmp_path).read_text("utf-8")).text
    assert "Compared is what follows the last => of an answer" in text
    assert "300 of 600" in text
    assert "did not ask the same" not in text
    assert score_table(tmp_path).count(" 300 ") == 1
    result["questions"]["num_asked"] = 200
    result["questions"]["all"]["questions"] = 200
    (tmp_path / "after" / "eval.json").write_text(json.dumps(result), encoding="utf-8")
    text = Page(write_report(tmp_path).read_text("utf-8")).text
    assert "did not ask the same questions" in text
    assert "300 / 200" in text
    assert "300 / 200" in score_table(tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    """A run of somebody else's: an error that names the folder, no traceback."""
    write_run(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match="report: no files can be made in the folder"):
        write_report(tmp_path)


def test_a_report_replaces_the_older_one(tmp_path):
    """Writing twice leaves one page that shows the newer state, and no temporary file."""
    write_run(tmp_path, steps=8)
    write_report(tmp_path)
    write_run(tmp_path, steps=12)
    assert "tokens seen 12,000" in Page(write_report(tmp_path).read_text("utf-8")).text
    assert [path.name for path in tmp_path.glob("report*")] == ["report.html"]


def test_the_terminal_table_has_before_and_after(tmp_path):
    """Each task stands in one row with its baseline and the score of each evaluation."""
    write_pipeline(tmp_path)
    text = score_table(tmp_path)
    [row] = [line for line in text.splitlines() if "fee_sum" in line]
    assert re.search(r"fee_sum.*100.*0\.100.*0\.020 \[0\.000, 0\.080\].*0\.950 \[0\.880, 1\.000\]", row)
    assert "before" in text
    assert "held-out loss 1.2500" in text
    write_run(tmp_path / "alone")
    assert score_table(tmp_path / "alone") == "no evaluation was made"


def test_folders_that_are_neither_are_refused(tmp_path):
    """A wrong folder is the user's error and names what was looked for."""
    with pytest.raises(UserError, match=r"neither a run nor a pipeline(?s:.)*no metrics.jsonl"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "none")
    with pytest.raises(UserError, match="no pipeline here"):
        read_pipeline(tmp_path)
    (tmp_path / "pipeline.json").write_text('{"stages": [1]}', encoding="utf-8")
    with pytest.raises(UserError, match="pipeline's record"):
        read_pipeline(tmp_path)


def test_read_pipeline_returns_the_record(tmp_path):
    """The document is the one that the pipeline wrote."""
    assert write_pipeline(tmp_path) == read_pipeline(tmp_path)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.013, 0.94), (-3, 7), (1, 20_000), (5.1e-7, 9.9e-7)])
def test_ticks_are_few_round_and_inside(low, high):
    """Between 3 and 11 marks, evenly spaced, never outside of the axis."""
    ticks = plan_ticks(low, high)
    assert 3 <= len(ticks) <= 11
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    steps = {round((b - a) / (high - low), 9) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1


def test_thinning_keeps_the_mean_and_the_last_step():
    """A long series is cut to the limit; each group is its mean, and its last step is the axis position."""
    points = [(step, float(step)) for step in range(1, 1001)]
    thinned, size = thin(points)
    assert len(thinned) <= MAX_POINTS
    assert thinned[0] == (size, sum(range(1, size + 1)) / size)
    assert thinned[-1][0] == 1000


def test_a_chart_without_values_is_not_drawn_and_one_value_is():
    """None where nothing can be shown; a single point lies inside the plot."""
    assert plan_chart("t", [("a", [(1, None)])], x_label="step", y_label="y") is None
    chart = plan_chart("t", [("a", [(3, 2.0)])], x_label="step", y_label="y")
    [dot] = chart.lines[0].dots
    assert 64 <= dot[0] <= 544
    assert 12 <= dot[1] <= 240


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1,234,567"), (0.00012345, "1.234e-4"), (3.14159, "3.142"), (1e9, "1e9"), (250.0, "250")],
)
def test_numbers_are_written_for_people(value, text):
    """Four significant digits and no trailing zeros."""
    assert format_number(value) == text
