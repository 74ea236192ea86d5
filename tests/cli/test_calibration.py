"""`samebits calibrate` on files: faults are refused, orders change no byte, bad input is named with its place."""

import dataclasses
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from samebits import LLM, SamplingParams
from samebits.cli import calibration, main, mismatch, plots, provenance, report, scores
from samebits.cli.main import app
from samebits.correction import PRESETS, LogProbs, preset
from samebits.correction.calibration import candidate_grid
from samebits.integrations import corrections
from samebits.integrations.rollouts import RolloutFormatError, read_rollouts, write_rollouts
from samebits.trainer import exact_model

from helpers import faults

PARAMS = SamplingParams(n=6, temperature=0.8, max_tokens=8, seed=5)  # draws whose mean gradient stands out of its noise


@pytest.fixture(scope="module")
def files(checkpoint, tmp_path_factory):
    """(model, a noisy engine's file, an exact reference): 12 prompts, 6 samples each, rewards: the odd tokens."""
    folder = tmp_path_factory.mktemp("files")
    prompts, exact, noisy = (folder / f"{name}.jsonl" for name in ("prompts", "exact", "noisy"))
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [5 + i, 6, 7]}) + "\n" for i in range(12)))
    path = checkpoint("llama")
    llm = LLM(path, kv_cache_memory_bytes=2**22, skip_tokenizer_init=True)
    mismatch.write_exact(llm, prompts, exact, PARAMS)
    again = folder / "again.jsonl"
    mismatch.write_exact(llm, prompts, again, dataclasses.replace(PARAMS, seed=4))
    rng = np.random.default_rng(0)
    for source, target in ((exact, exact), (again, noisy)):
        rollouts = list(read_rollouts(source))
        for r in rollouts:
            r.reward = float((r.token_ids % 2).mean())
            if target is noisy:
                r.rollout = np.minimum(r.rollout + 0.1 * rng.normal(size=len(r.rollout)), 0)
                r.old = r.provenance = None
        write_rollouts(target, rollouts)
    return exact_model(path), noisy, exact


@pytest.fixture(scope="module")
def plain(files):
    """The calibration of these files as they are; it only gets read."""
    return calibrated(files)


def calibrated(files, noisy=None, exact=None, params=PARAMS, model=None, **settings):
    return calibration.calibrate_files(noisy or files[1], exact or files[2], model or files[0], params, **settings)


def facts(found):
    """The report as bytes, without the files' names."""
    numbers = report.calibration_numbers(found, {})
    for name in ("rollouts", "reference"):
        del numbers["provenance"][name]
    shown = report.page("x", [p for p in report.calibration(found, {}) if p.title != "What this was made from"])
    return report.strict_json(numbers).encode() + shown.encode()


def changed(path, target, change):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number, record in enumerate(records):
        change(number, record)
    target.write_text("".join(json.dumps(r) + "\n" for r in records if r))
    return target


def test_prompts_share_no_random_numbers_with_a_seed(checkpoint, tmp_path):
    """They are the units of every interval. Equal lines get samples of their own, the same again."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n' * 2)
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22, skip_tokenizer_init=True)
    outs = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for out in outs:
        mismatch.write_exact(llm, prompts, out, PARAMS)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    first, second = ([r.token_ids.tolist() for r in read_rollouts(outs[0]) if r.group == name] for name in "12")
    assert len(first) == len(second) == PARAMS.n
    assert not any(a in second for a in first)


def test_orders_and_parts_of_files_change_no_byte(files, plain, tmp_path):
    expected = facts(plain)
    shuffled, parts = tmp_path / "shuffled.jsonl", tmp_path / "parts"
    lines = files[1].read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    shuffled.write_text("".join(lines))
    parts.mkdir()
    for k in range(3):
        (parts / f"{k}.jsonl").write_text("".join(lines[k::3]))
    assert facts(calibrated(files, shuffled)) == expected
    assert facts(calibrated(files, parts)) == expected
    exact = tmp_path / "exact.jsonl"
    exact.write_text("".join(reversed(files[2].read_text().splitlines(keepends=True))))
    assert facts(calibrated(files, exact=exact)) == expected
    assert facts(calibrated(files, seed=1)) != expected


def test_a_report_says_what_it_was_made_from(files):
    found = calibrated(files, batch_size=32, seed=5)
    assert found.provenance["batch_size"] == 32 and found.provenance["seed"] == 5
    assert found.provenance["rollouts_prompts"] == found.provenance["reference_prompts"] == 12
    made = next(read_rollouts(files[2])).provenance
    assert {name: found.provenance[name] for name in made} == made
    text = report.markdown(report.calibration(found, {}))
    for fact in (made["model"], made["contract"], str(files[1]), str(files[2]), "temperature: 0.8"):
        assert fact in text


def test_an_inexact_reference_is_refused_with_its_token(files, tmp_path):
    with pytest.raises(RolloutFormatError, match=r"noisy.jsonl:\d+: rollout_logprobs\[\d\] is .* the exact one"):
        calibrated(files, exact=files[1])  # the engine's own file

    def nudge(number, record):
        if number == 7:
            value = np.float32(record["rollout_logprobs"][2])
            record["rollout_logprobs"][2] = float(np.nextafter(value, np.float32(-9)))

    wrong = changed(files[2], tmp_path / "bit.jsonl", nudge)
    with pytest.raises(RolloutFormatError, match=r"bit.jsonl:8: rollout_logprobs\[2\]"):
        calibrated(files, exact=wrong)


@pytest.mark.parametrize("fault", ["model", "temperature", "min_p"])
def test_a_reference_of_something_else_is_refused(files, checkpoint, tmp_path, fault):
    """With its provenance by name, and without it by its bits."""
    model, params = files[0], PARAMS
    if fault == "model":
        model = exact_model(checkpoint("llama"))
        with torch.no_grad():
            model.lm_head.weight.mul_(1.001)
    else:
        params = dataclasses.replace(PARAMS, **{fault: 0.9 if fault == "temperature" else 0.2})
    named = fault if fault != "model" else "sampled with model"
    bare = changed(files[2], tmp_path / "bare.jsonl", lambda _, record: record.pop("provenance"))
    rollouts = list(mismatch.scored(read_rollouts(files[2]), model, params))
    with pytest.raises(RolloutFormatError, match=named):
        provenance.check_reference(rollouts, provenance.expected_provenance(model, params))
    rollouts = list(mismatch.scored(read_rollouts(bare), model, params))
    with pytest.raises(RolloutFormatError, match=r"bare.jsonl:\d+: rollout_logprobs.*no exact reference"):
        provenance.check_reference(rollouts, provenance.expected_provenance(model, params))


def test_rollouts_that_the_model_cannot_have_sampled_are_refused(files, tmp_path):
    far = changed(
        files[1], tmp_path / "far.jsonl", lambda _, r: r.update(rollout_logprobs=[-0.1] * len(r["token_ids"]))
    )
    with pytest.raises(RolloutFormatError, match=r"far.jsonl: log-probs differ .* nats on average.*--temperature"):
        calibrated(files, far)
    filtered = dataclasses.replace(PARAMS, min_p=0.9)
    with pytest.raises(RolloutFormatError, match=r"noisy.jsonl: \d+ of \d+ tokens could not be sampled.*--min-p"):
        calibrated(files, params=filtered)


def test_the_checksum_of_an_engine_is_that_of_the_exact_model(files):
    made = next(read_rollouts(files[2])).provenance
    assert made == provenance.expected_provenance(files[0], PARAMS)


BAD = {
    "huge rewards": (lambda n, r: r.update(reward=1e300), r":1: reward is 1e\+300; expected a number of at most"),
    "log-probs of -1e30": (
        lambda n, r: r["rollout_logprobs"].__setitem__(0, -1e30),
        r":1: rollout_logprobs\[0\] is -1e",
    ),
    "an id out of range": (
        lambda n, r: n == 4 and r["token_ids"].__setitem__(1, 5000),
        r":5: token_ids\[1\] is 5000; expected ids below 1001",
    ),
    "a prompt's id out of range": (
        lambda n, r: n == 4 and r["prompt_token_ids"].__setitem__(0, 1001),
        r":5: .*prompt_token_ids",
    ),
    "groups missing": (lambda n, r: n == 3 and r.pop("group"), r":4: no group, while .*:\d+ has one"),
    "equal groups": (
        lambda n, r: n == 3 and r.update(prompt_token_ids=[9, 9]),
        r"group '1' has another prompt than in .*; expected equal",
    ),
    "no records": (lambda n, r: r.clear(), r"bad.jsonl: no rollouts"),
    "truncated": (None, r":72: JSONDecodeError"),
    "provenance": (lambda n, r: r.update(provenance=3), r":1: provenance is 3; expected an object"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_records_are_named(files, tmp_path, what):
    change, message = BAD[what]
    bad = tmp_path / "bad.jsonl"
    if change is None:
        bad.write_text(files[1].read_text()[:-30])
    else:
        changed(files[1], bad, change)
    with pytest.raises(RolloutFormatError, match=message):
        calibrated(files, bad)


def test_a_reference_of_other_prompts_under_the_same_groups_is_refused(files, tmp_path):
    def swap(_, record):
        record["prompt_token_ids"] = [*record["prompt_token_ids"], 9]

    with pytest.raises(RolloutFormatError, match="has another prompt than in"):
        calibrated(files, exact=changed(files[2], tmp_path / "other.jsonl", swap))


def test_copies_are_left_out_and_counted(files, tmp_path):
    """Records written twice under other groups are no new evidence; short answers may repeat by chance."""
    records = [json.loads(line) for line in files[1].read_text().splitlines()]
    twice = records + [{**r, "group": f"x{r['group']}", "reward": r["reward"] + 1} for r in records]
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in reversed(twice)))
    backwards, _ = provenance.in_order(read_rollouts(path))
    path.write_text("".join(json.dumps(r) + "\n" for r in twice))
    forwards, _ = provenance.in_order(read_rollouts(path))
    assert [(r.group, r.reward) for r in forwards] == [(r.group, r.reward) for r in backwards]
    twice = records + [{**r, "group": r["group"]} for r in records]
    path.write_text("".join(json.dumps(r) + "\n" for r in twice))
    found = calibrated(files, path)
    copies = sum(sum(r["rollout_logprobs"]) < -20 for r in records)
    assert copies > 30
    assert found.warnings == [f"{path}: {copies} records are copies of others, and are left out."]
    assert found.provenance["rollouts_sequences"] == 144 - copies
    short = [{"token_ids": [3], "rollout_logprobs": [-0.1], "old_logprobs": [-0.1]}] * 4
    path.write_text("".join(json.dumps(r) + "\n" for r in short))
    assert provenance.in_order(read_rollouts(path))[1] == 0


def test_rollouts_with_experts_are_told_where_replay_is_measured(files, plain, tmp_path):
    def route(_, record):
        record["routed_experts"] = [[[0, 1]]] * (len(record["prompt_token_ids"]) + len(record["token_ids"]) - 1)

    found = calibrated(files, changed(files[1], tmp_path / "routed.jsonl", route))
    assert "`samebits diagnose --model`" in found.warnings[0] and not plain.warnings
    assert found.result.verdict == plain.result.verdict


def test_groups_in_one_file_only_are_left_out_and_counted(files, tmp_path):
    fewer = changed(files[2], tmp_path / "fewer.jsonl", lambda n, r: r["group"] == "1" and r.clear())
    found = calibrated(files, exact=fewer)
    assert "1 groups are in one of the two files only" in found.warnings[0]
    assert found.provenance["rollouts_prompts"] == 11


def test_groups_in_one_file_alone_are_refused(files, tmp_path):
    bare = changed(files[2], tmp_path / "bare.jsonl", lambda n, r: r.pop("group"))
    with pytest.raises(RolloutFormatError, match="one of them has groups; expected them in both or in neither"):
        calibrated(files, exact=bare)


def test_settings_are_checked_before_the_work(tmp_path):
    with pytest.raises(ValueError, match="batch_size=0"):
        calibration.calibrate_files(tmp_path / "nowhere.jsonl", None, batch_size=0)


def test_exact_rollouts_need_no_correction(files):
    """Those of an exact engine, re-scored: nothing could be in bypass mode here."""
    found = calibrated(files, noisy=files[2])
    assert found.result.verdict.headline == "No correction needed"


def test_rollouts_that_say_that_they_were_sampled_otherwise_are_refused(files):
    for name, value in (("temperature", 0.7), ("min_p", 0.1)):
        other = dataclasses.replace(PARAMS, **{name: value})
        with pytest.raises(RolloutFormatError, match=rf"exact.jsonl:1: it was sampled with {name} "):
            mismatch.diagnose(files[2], files[0], other, use_tqdm=False)
        with pytest.raises(RolloutFormatError, match=rf"it was sampled with {name} "):
            calibration.calibrate_files(files[2], None, files[0], other)


def test_commands_have_options_for_all_of_a_distribution():
    assert provenance._distribution(SamplingParams(min_tokens=1)).keys() == main.DISTRIBUTION.keys()


@pytest.mark.parametrize("ends", [{}, {"ignore_eos": True, "stop_token_ids": (7, 9)}], ids=str)
def test_what_may_not_end_a_rollout_is_part_of_its_distribution(checkpoint, tmp_path, ends):
    """And of its origin: with it the rollouts are exact, and without it no rollouts of these options."""
    prompts, exact, params = (
        tmp_path / "prompts",
        tmp_path / "exact.jsonl",
        dataclasses.replace(PARAMS, min_tokens=8, **ends),
    )
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    mismatch.write_exact(
        LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22, skip_tokenizer_init=True), prompts, exact, params
    )
    model = exact_model(checkpoint("llama"))
    found = mismatch.diagnose(exact, model, dataclasses.replace(params, max_tokens=None), use_tqdm=False)
    assert found.summary["max_abs"] == 0
    provenance.check_reference(
        mismatch.scored(read_rollouts(exact), model, params), provenance.expected_provenance(model, params)
    )
    others = [{"min_tokens": 0}, *({name: SamplingParams.__dataclass_fields__[name].default} for name in ends)]
    for other in others:
        with pytest.raises(RolloutFormatError, match=f"it was sampled with {next(iter(other))} "):
            mismatch.diagnose(exact, model, dataclasses.replace(params, **other), use_tqdm=False)


def test_a_mismatch_beyond_numerics_is_doubted(files, tmp_path):
    far = changed(files[1], tmp_path / "far.jsonl", lambda n, r: r.update(old_logprobs=[-9.0] * len(r["token_ids"])))
    assert "more than numerics can explain" in mismatch.diagnose(far, use_tqdm=False).warnings[0]
    assert not mismatch.diagnose(files[1], files[0], PARAMS, use_tqdm=False).warnings


def test_settings_to_paste_are_yaml():
    """None is null, and 1e-05 a number, in every text that is no refusal."""
    writers = {"verl": corrections.to_verl, "TRL": corrections.to_trl, "Miles": corrections.to_miles}
    writers["slime"] = corrections.to_slime
    read = 0
    for name in PRESETS:
        wanted = preset(name, **({"ratio": "current/rollout"} if name == "opsm" else {}))
        for framework, text in mismatch.snippets("decoupled", wanted).items():
            settings = yaml.safe_load(text)
            if settings is not None:
                assert settings == writers[framework.split(":")[0]]("decoupled", wanted)
                read += 1
    assert read > 20


def test_large_vocabularies_get_the_same_gradients_up_to_the_projections_error(files, monkeypatch):
    """Every unit's inner products with every other, from independent projections against the exact factors."""
    model, noisy, _ = files
    pairs = [provenance.pair_of(r, model.config.vocab_size) for r in read_rollouts(noisy)]
    unit = torch.arange(len(pairs)).repeat_interleave(torch.tensor([len(tokens) for _, tokens in pairs]))
    ones = torch.ones(len(unit), dtype=torch.float64)
    exact = scores.token_scores(model, pairs, 0.8, 0).gradients(ones, unit, len(pairs))
    assert exact.values.shape[1] == 1
    gram = exact.gram(exact)
    scale = gram.diag().sqrt()
    monkeypatch.setattr(scores, "_EXACT_VOCAB", 0)
    errors = []
    for seed in range(4):
        projected = scores.token_scores(model, pairs, 0.8, seed).gradients(ones, unit, len(pairs))
        assert projected.values.shape[1] == scores._BLOCKS
        errors.append((projected.gram(projected) - gram) / (scale[:, None] * scale))
    spread = torch.stack(errors)
    columns = projected.values.shape[2] // model.config.hidden_size * scores._BLOCKS
    off = ~torch.eye(len(pairs), dtype=torch.bool)
    assert spread.square().mean().sqrt() < 2 / columns**0.5, "no larger than independent Gaussian columns make it"
    assert spread[:, off].mean().abs() < 0.02, "no bias"
    assert spread.abs().max() > 0, "it was projected"


def test_what_trainers_may_exclude_and_json_lacks_is_no_error(files, tmp_path):
    """-inf is legal in old_logprobs, written as -1000; sums of it are no overflow, and what is infinite is null."""

    def exclude(number, record):
        old = [lp - 0.01 for lp in record["rollout_logprobs"]]
        record["old_logprobs"] = [-1000.0] * (len(old) - 1) + old[-1:] if number < 2 else old

    path = changed(files[1], tmp_path / "excluded.jsonl", exclude)
    found = calibration.calibrate_files(path, None)
    text = report.strict_json(report.calibration_numbers(found, {}))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    diagnosed = mismatch.diagnose(path, use_tqdm=False).summary
    json.loads(report.strict_json({**diagnosed, "inf": float("inf")}), parse_constant=lambda name: pytest.fail(name))


def test_a_users_own_candidates_join_the_grid(files, tmp_path):
    own = tmp_path / "own.json"
    own.write_text(json.dumps({
        "mine": {"weight": {"ratio": "old/rollout", "high": 1.3}, "gates": [
            {"ratio": "old/rollout", "kernel": "k3", "aggregate": "mean", "high": 0.01}]},
        "dppo": {"preset": "dppo_tv", "high": 0.1},
    }))  # fmt: skip
    found = calibrated(files, candidates=own)
    numbers = report.calibration_numbers(found, {})
    rows = {row["name"]: row for row in numbers["assessments"]}
    assert rows["mine"]["correction"]["weight"]["high"] == 1.3
    assert {"mine", "dppo", "tis_geo_rs@" + next(n for n in rows if n.startswith("tis_geo_rs@")).split("@")[1]} <= set(
        rows
    )
    for wrong, message in (
        ('{"x": {"preset": "nothing"}}', "own.json: x: .*choose one of"),
        ('{"x": {"weight": {"ratio": "current/rollout"}}}', "own.json: x: in mode decoupled"),
        ("[1]", "own.json: not an object; expected a JSON object"),
        ("{", "own.json: .*expected a JSON object"),
        ('{"x": []}', "own.json: x: a correction is an object"),
        ('{"x": {"weight": []}}', "own.json: x: a weight is an object"),
        ('{"none": {"preset": "token_tis"}}', "own.json: none: a candidate of the grid's; expected another name"),
    ):
        own.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            calibrated(files, candidates=own)


def test_other_ratios_are_diagnosed_where_the_records_have_them(files, tmp_path):
    def stale(_, record):
        record["old_logprobs"] = record["rollout_logprobs"]
        record["current_logprobs"] = [lp - 0.25 for lp in record["rollout_logprobs"]]

    path = changed(files[1], tmp_path / "stale.jsonl", stale)
    for ratio in ("current/rollout", "current/old"):
        found = mismatch.diagnose(path, use_tqdm=False, ratio=ratio)
        assert found.summary["mean_abs"] == pytest.approx(0.25)
        assert not found.warnings
        above, below = ratio.split("/")
        first = found.worst[0]
        assert first[f"{above}_logprob"] == pytest.approx(first[f"{below}_logprob"] - 0.25)
        told = report.markdown(report.diagnosis(found))
        assert f"perplexity, {below}" in told and f"| {below} | {above} |" in told
    assert mismatch.diagnose(path, use_tqdm=False).summary["max_abs"] == 0
    with pytest.raises(RolloutFormatError, match=r"exact.jsonl:1: no current_logprobs; expected them"):
        mismatch.diagnose(files[2], use_tqdm=False, ratio="current/old")


def test_a_page_without_a_folder_is_refused_before_the_work(tmp_path):
    missing = str(tmp_path / "nowhere" / "x.html")
    for command in (["diagnose"], ["calibrate"]):
        done = CliRunner().invoke(app, [*command, str(tmp_path / "unread.jsonl"), "--html", missing])
        assert "no such folder" in str(done.exception)


def test_the_verdict_is_the_same_on_page_console_and_in_json(plain):
    verdict = plain.result.verdict
    numbers = json.loads(report.strict_json(report.calibration_numbers(plain, {})))
    parts = report.calibration(plain, {})
    assert numbers["verdict"]["headline"] == verdict.headline
    for text in (report.markdown(parts), report.page("x", parts)):
        assert verdict.headline in text
        assert verdict.reason[1:30] in text
    assert "recommended: none" not in report.markdown(parts)


def test_the_chosen_one_is_always_shown(plain, monkeypatch):
    """In the table, and its family's line in the plot, however many better ones there are."""
    monkeypatch.setattr(plots, "_SHOWN", 1)
    monkeypatch.setattr(plots, "_FAMILIES", 1)
    family = min(plots._families(plain.result).items(), key=lambda item: max(c for _, c in item[1]))[0]
    last = next(a.name for a in plain.result.assessments if a.name.startswith(f"{family}@"))
    verdict = dataclasses.replace(plain.result.verdict, recommended=last, any_of=())
    result = dataclasses.replace(plain.result, verdict=verdict)
    assert {last, "none"} == {a.name for a in plots.shown_candidates(result)}
    assert f">{family}<".encode() in plots.thresholds(result, "svg")
    assert f">{family}<".encode() not in plots.thresholds(plain.result, "svg")


def test_the_glossary_has_a_pages_terms_also_where_html_spells_them_otherwise():
    table = "| C(r), A < 0 | k1 |\n| --- | --- |\n| 1 | 2 |"
    shown = report.page("x", [report.Text("Candidates", table)])
    assert re.findall("<dt>(.*?)</dt>", shown) == ["C(r), A &lt; 0", "k1"]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (390, "dark")])
def test_the_page_fits_its_window_and_follows_the_scheme(plain, tmp_path, width, scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium")
    path = tmp_path / "calibration.html"
    path.write_text(report.page("Calibration", report.calibration(plain, {"verl": "rollout_is: token"})))
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        problems: list[str] = []
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.goto(path.as_uri())
        picture = page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        assert Path(tmp_path / "page.png").stat().st_size == len(picture) > 20_000
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
        assert page.locator(".verdict h2").bounding_box()["y"] < 300, "the verdict isn't what one sees first"
        sizes = page.evaluate("[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)")
        assert min(sizes) > 7, "text of a figure is too small to read"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        assert page.locator("th abbr").count() >= 4
        assert page.locator("details").count() >= 3
        page.emulate_media(media="print")
        page.set_viewport_size({"width": 980, "height": 690})  # a sheet on its side
        rows = page.evaluate("[...document.querySelectorAll('tr')].map(t => t.getBoundingClientRect().height)")
        assert min(rows) > 0
        assert max(rows) < 90, "a row of a printed table is as tall as a paragraph"
        assert not problems
        browser.close()


def test_options_that_need_a_model_are_refused_without_one(files):
    done = CliRunner().invoke(app, ["diagnose", str(files[1]), "--temperature", "0.3", "--dtype", "bfloat16"])
    assert isinstance(done.exception, ValueError)
    assert "dtype, temperature: say how a model scores" in str(done.exception)


def test_a_rollout_that_fails_leaves_an_earlier_file(files, checkpoint, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [5, 6]}))
    out.write_text("what was there\n")
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22)
    faults.logit_nan(llm, 500)
    with pytest.raises(FloatingPointError, match=r"prompts\.jsonl:1: non-finite logits"):
        mismatch.write_exact(llm, prompts, out, PARAMS)
    assert out.read_text() == "what was there\n"
    done = CliRunner().invoke(
        app, ["rollout", "no-such-model", str(prompts), "--out", str(tmp_path / "no" / "out.jsonl")]
    )
    assert isinstance(done.exception, ValueError) and "no such folder" in str(done.exception)


def test_draws_of_several_turns_are_no_copies(files):
    first = next(read_rollouts(files[1]))
    masked = np.arange(len(first.token_ids)) > 0
    twice = dataclasses.replace(first, mask=masked, rollout=np.where(masked, -0.1, np.nan))
    assert provenance.in_order([twice, twice])[1] == 0


def test_in_bypass_verl_has_each_gate():
    draws = np.random.default_rng(0)
    rollout = -torch.from_numpy(draws.exponential(size=(40, 9)))
    old = (rollout + 0.1 * torch.from_numpy(draws.normal(size=(40, 9)))).clamp(max=0)
    grid = candidate_grid(LogProbs(torch.ones(40, 9, dtype=torch.bool), rollout, old), "bypass")
    families = {name.partition("@")[0] for name in grid}
    assert families == {"none", "geo_rs", "k3_mean_rs", "k3_sum_rs", "trm", "opsm", "veto"}
    for name, candidate in grid.items():
        text = mismatch.snippets("bypass", candidate)["verl: algorithm.rollout_correction"]
        assert ("can't express" in text) == name.startswith(("opsm", "veto"))  # verl has neither
