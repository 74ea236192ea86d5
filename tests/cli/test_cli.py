"""The command line and the examples, run as a user runs them."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from samebits import __version__, engine
from samebits.cli import main
from samebits.cli.main import app
from samebits.engine import Completion, EngineConfig, RequestOutput
from samebits.engine.executor import LocalExecutor
from samebits.kernels import ops
from samebits.kernels.libraries import xformers_state
from samebits.server.options import ServerOptions
from samebits.trainer.rl import TrainConfig

from helpers import faults
from helpers.commands import samebits
from helpers.families import family_config
from helpers.serving import add_tokenizer, free_port, served_checkpoint

ROOT = pathlib.Path(__file__).parents[2]


def run(*command, **kwargs):
    env = {**os.environ, "COLUMNS": "120"}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, **kwargs)


def started(*args):
    """`samebits` in a process of its own."""
    return run("-c", "from samebits.cli.main import main; main()", *args)


def test_generate_prints_the_same_json_for_the_same_seed(checkpoint, tmp_path):
    model = served_checkpoint(checkpoint("llama"), tmp_path / "model")
    args = ("generate", model, "The capital of France is", "-n", 2, "--max-tokens", 8, "--seed", 3, "--json")
    first, second = started(*args), samebits(*args)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert len(result["completions"]) == 2
    assert first.stdout == second.stdout


def test_chat_answers_from_standard_input(smollm2):
    done = samebits("chat", smollm2, "--temperature", 0, input="What is the capital of France?\nexit\n")
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout


def test_an_answer_that_ctrl_c_stops_leaves_no_token_to_the_next(smollm2, monkeypatch):
    faults.before(monkeypatch, LocalExecutor, "submit", faults.ctrl_c, at=3)
    questions = "What is the capital of France?\nWhat is the capital of Italy?\nexit\n"
    done = samebits("chat", smollm2, "--temperature", 0, "--max-tokens", 8, input=questions)
    assert done.returncode == 0, done.stderr
    first, second, _ = done.stdout.splitlines()
    assert first == "you> The capital of"
    assert second == "you> The capital of Italy is Rome."


def test_a_models_text_is_printed_as_it_is(monkeypatch):
    """No emoji for its name, no space for a tab, no end of a line at 80 columns."""
    text = "a :smile: b\t[bold]c[/bold] " + "word " * 30 + "end"
    completion = Completion(0, [5], [-1.0], "length", None, [], text=text)
    output = RequestOutput("r", "p", [1], [completion], None, True)
    monkeypatch.setattr(engine, "LLM", lambda *_, **__: SimpleNamespace(generate=lambda *_: [output]))
    monkeypatch.setattr(main, "console", Console(file=io.StringIO()))
    app(["generate", "model", "prompt"], standalone_mode=False)
    assert main.console.file.getvalue().split("\n", 1)[1] == text + "\n"
    monkeypatch.setattr(main, "console", Console(file=io.StringIO()))
    assert main._show([output]) == main.console.file.getvalue() == text


def test_rollouts_never_replace_their_prompts(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    with pytest.raises(ValueError, match="is the file of the prompts"):
        app(["rollout", "model", str(prompts), "--out", f"{tmp_path}/./prompts.jsonl"], standalone_mode=False)


def test_a_failed_sample_is_told_with_its_reason(checkpoint, tmp_path):
    model = served_checkpoint(checkpoint(), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # finite, as all weights that load, but not what they compute
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    reason = "non-finite logits; check the weights"
    for options in ((), ("--json",)):
        done = samebits("generate", model, "hi", "-n", 2, *options)
        assert done.returncode == 2 and f"sample 0: {reason}" in " ".join(done.stderr.split())
    assert [c["finish_reason"] for c in json.loads(done.stdout)["completions"]] == ["error", "error"]
    done = samebits("chat", model, input="hi\nexit\n")
    assert done.returncode == 0 and f"error: {reason}" in done.stdout


@pytest.mark.parametrize("option", [("--adapter", "somewhere"), ("--seed", 3), ("--plant-fault", "lm_head")])
def test_coverage_refuses_options_of_the_proof(checkpoint, option):
    done = samebits("verify", "--coverage", checkpoint(), *option)
    assert done.returncode == 2 and f"leave out {option[0]}" in " ".join(done.stderr.split())


def test_coverage_of_a_config_or_a_checkpoint_is_a_table_or_a_reason(checkpoint, tmp_path):
    family_config("glm4_moe").save_pretrained(tmp_path / "config")
    for model in (tmp_path / "config", checkpoint("glm4_moe")):
        printed = samebits("verify", "--coverage", model).stdout
        assert "2 of 6 experts" in printed and "experts, silu" in printed and "glm4_moe: covered" in printed
    family_config("deepseek_v3").save_pretrained(tmp_path / "refused")
    refused = samebits("verify", "--coverage", tmp_path / "refused")
    assert refused.returncode == 1 and "deepseek_v3: not covered. model.layers.0.self_attn" in refused.stdout
    family_config("llama", intermediate_size=10**12).save_pretrained(tmp_path / "large")
    large = samebits("verify", "--coverage", tmp_path / "large")
    assert large.returncode == 2 and "a layer of each kind takes" in large.stderr


def test_verify_passes(checkpoint):
    good = samebits("verify", checkpoint("qwen3"))
    assert good.returncode == 0, good.stderr
    assert "max |rollout - trainer| = 0" in good.stdout


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("model.layers.1.mlp.down_proj", marks=pytest.mark.slow),
        "model.layers.0.self_attn.q_norm",
        pytest.param("lm_head", marks=pytest.mark.slow),
    ],
)
def test_verify_finds_a_planted_fault(checkpoint, module):
    bad = samebits("verify", checkpoint("qwen3"), "--plant-fault", module)
    assert bad.returncode == 1
    assert f"first difference: {module}" in bad.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("verify", "MODEL", "--plant-fault", "model.nowhere"),
        ("generate", "/no/such/model", "hi"),
        ("contract", "--dtype", "float64"),
    ],
)
def test_bad_input_is_one_line_without_traceback(checkpoint, args):
    done = samebits(*(checkpoint("llama") if a == "MODEL" else a for a in args))
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr


def test_contract_prints_the_hash_that_the_engine_uses(checkpoint):
    from samebits import LLM

    printed = json.loads(samebits("contract", "--dtype", "bfloat16", "--json").stdout)
    llm = LLM(checkpoint("llama"), dtype="bfloat16", kv_cache_memory_bytes=2**20)
    assert printed["hash"] == llm.contract.hash
    assert printed["xformers"] == xformers_state()


@pytest.mark.parametrize("command", ["", "generate", "chat", "serve", "train", "verify", "bench", "rollout"])
def test_help_needs_no_torch(command):
    code = f"""
import sys
from samebits.cli.main import main
sys.argv = ["samebits", *{command.split()}, "--help"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def command_parameters(name):
    from samebits.cli.main import app

    return {p.name: p for p in typer.main.get_command(app).commands[name].params}


@pytest.mark.parametrize(
    ("command", "config", "own"),
    [
        ("serve", EngineConfig, {"max_num_batched_tokens": 256}),
        ("serve", ServerOptions, {}),
        ("generate", EngineConfig, {}),
        ("rollout", EngineConfig, {}),
        ("bench", EngineConfig, {"exact": ..., "kv_cache_memory_bytes": 2**30, "skip_tokenizer_init": True}),
        (
            "train",
            TrainConfig,
            {"save_every": 50, **dict.fromkeys(("correction", "output_dir", "sampling", "engine"), ...)},
        ),
    ],
)
def test_every_field_of_a_configuration_is_an_option_with_its_default_and_help(command, config, own):
    """own: a command's own defaults; ... for fields that it asks for in another way."""
    parameters = command_parameters(command)
    for field in dataclasses.fields(config):
        if own.get(field.name) is ...:
            continue
        parameter = parameters[field.name]
        assert f"--{field.name.replace('_', '-')}" in parameter.opts
        assert parameter.help.endswith("."), field.name
        if field.default is dataclasses.MISSING:
            assert parameter.required
        else:
            assert parameter.default == own.get(field.name, field.default), field.name


def test_older_and_shorter_names_of_options_stay():
    assert {"--pp", "--pipeline-parallel-size"} == set(command_parameters("serve")["pipeline_parallel_size"].opts)
    assert {"-n", "--n"} == set(command_parameters("rollout")["n"].opts)
    assert {"-n", "--group-size"} == set(command_parameters("train")["group_size"].opts)
    assert {"kv_cache_memory_bytes", "engine_url", "exact", "check"} <= command_parameters("train").keys()


def test_engine_settings_reach_the_engine(checkpoint, tmp_path):
    """A sequence, a flag, a number and a table; stages and drafts change no bit."""
    prompts, one, staged = (tmp_path / name for name in ("prompts.jsonl", "one.jsonl", "staged.jsonl"))
    prompts.write_text(json.dumps({"prompt_token_ids": [5, 6, 7]}))
    drafts = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
    args = ("rollout", checkpoint("llama"), prompts, "--seed", 3, "--max-tokens", 8, "--out")
    stages = ("--pp", 2, "--backend", "inproc", "--no-enable-prefix-caching", "--stage-layers")
    for done in (samebits(*args, one), samebits(*args, staged, *stages, "1,1", *drafts)):
        assert done.returncode == 0, done.stderr
    assert staged.read_text() == one.read_text()
    wrong = samebits(*args, staged, *stages, "2,1,1")
    assert wrong.returncode == 2
    assert "stage_layers (2, 1, 1)" in wrong.stderr.replace("\n", " ")
    wrong = samebits(*args, staged, "--speculative-config", '{"method": "suffix", "depth": 3}')
    assert wrong.returncode == 2
    assert "speculative_config has no ['depth']" in wrong.stderr.replace("\n", " ")


@pytest.mark.usefixtures("rows_cost_nothing")
def test_bench_shows_what_was_drafted(checkpoint):
    drafts = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
    args = ("bench", checkpoint("llama"), "--workload", "short", "--repeats", 1, "--kv-cache-memory-bytes", 2**24)
    found = [json.loads(samebits(*args, "--json", *more).stdout) for more in (drafts, ())]
    drafted, plain = ([result["draft_tokens"] for result in results] for results in found)
    assert all(drafted) and not any(plain)
    shown = samebits(*args, *drafts).stdout
    assert "drafted" in shown and "accepted" in shown and "tokens a" in shown


def test_rollout_diagnose_and_calibrate_end_to_end(checkpoint, tmp_path):
    model, prompts, exact = checkpoint("llama"), tmp_path / "prompts.jsonl", tmp_path / "exact.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [5 + i, 6, 7]}) + "\n" for i in range(6)))
    args = ("--out", exact, "-n", 8, "--max-tokens", 12, "--seed", 3, "--temperature", 0.8)
    done = samebits("rollout", model, prompts, *args)
    assert done.returncode == 0, done.stderr
    assert "48 rollouts" in done.stdout
    found = samebits("diagnose", exact, "--model", model, "--temperature", 0.8, "--json", "--html", tmp_path / "d.html")
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert (summary["max_abs"], summary["trainer_gap"], summary["sequences"]) == (0.0, 0.0, 48)
    assert (tmp_path / "d.html").read_text().startswith("<!doctype html>")
    plain = samebits("diagnose", exact).stdout.replace("\n", " ")
    assert "mean |d|" in plain
    assert "engine's own, bit for bit" in plain

    records = [json.loads(line) for line in exact.read_text().splitlines()]
    for record in records:
        record["reward"] = float(sum(record["token_ids"]) % 2)
    exact.write_text("".join(json.dumps(r) + "\n" for r in records))
    for record in records:
        record["rollout_logprobs"] = [lp - 0.3 * (i % 3) for i, lp in enumerate(record["rollout_logprobs"])]
    noisy = tmp_path / "noisy.jsonl"
    noisy.write_text("".join(json.dumps(r) + "\n" for r in records))
    scorer = ("--model", model, "--temperature", 0.8)
    done = samebits("calibrate", noisy, "--reference", exact, *scorer, "--json", "--html", tmp_path / "c.html")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {a["name"] for a in result["assessments"]} >= {"none", "token_tis@2", "sequence_is", "veto@0.0001"}
    assert result["verdict"]["reason"]
    told = [a["alignment"] is None or a["unestimable"] is None for a in result["assessments"]]
    assert all(told) and ("headline" in result["verdict"])
    assert result["provenance"]["reference_sequences"] == 48
    assert len(result["provenance"]["model"]) == 32
    table = samebits("calibrate", noisy, "--reference", exact)
    assert "No gradients to compare" in table.stdout.replace("\n", " "), table.stderr
    assert (tmp_path / "c.html").exists()
    bad = samebits("diagnose", prompts)
    assert bad.returncode == 2
    assert "prompts.jsonl:1: no token_ids" in bad.stderr.replace("\n", "")


@pytest.mark.slow
def test_mismatch_example_reports_a_real_mismatch_and_an_exact_null(smollm2, tmp_path):
    args = ("--model", smollm2, "--prompts", 2, "-n", 2, "--max-tokens", 4, "--out", tmp_path)
    done = run(ROOT / "examples" / "mismatch.py", *args)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| mean |d|".replace("|d|", "\\|d\\|")))
    engine, exact = (float(cell) for cell in row.split(" | ")[1:3] for cell in [cell.strip(" |")])
    assert engine > 0 == exact
    for name in ("diagnosis.html", "calibration.html", "calibration.json", "sizes.png", "kept.png", "report.md"):
        assert (tmp_path / name).stat().st_size > 500


def test_readme_example_is_the_quickstart():
    source = (ROOT / "examples" / "quickstart.py").read_text()
    body = source.split('"""', 2)[2].strip()
    assert body in (ROOT / "README.md").read_text()


def test_the_quickstart_runs(smollm2):
    done = run(ROOT / "examples" / "quickstart.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 4
    assert "weight version 1" in done.stdout


@pytest.mark.parametrize("name", ["llama", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_demo_ends_in_equality_and_shows_the_mismatch_without(checkpoint, request, tmp_path, name):
    if name == "smollm2":
        path = request.getfixturevalue(name)
    else:
        sizes = {"hidden_size": 320, "intermediate_size": 768, "num_attention_heads": 16}
        path = served_checkpoint(checkpoint(name, **sizes), tmp_path / "model")
    done = run(ROOT / "examples" / "demo.py", "--model", path, "--max-tokens", 6, "-n", 1)
    assert done.returncode == 0, done.stderr
    exact, off = (line for line in done.stdout.splitlines() if line.startswith("max |rollout"))
    assert "= 0 over" in exact
    assert exact.endswith("bitwise equal")
    assert off.endswith("tokens differ")
    assert "= 0 over" not in off


@pytest.mark.slow
def test_throughput_benchmark_compares_engines(smollm2, tmp_path):
    out = tmp_path / "result.json"
    done = run(
        ROOT / "benchmarks" / "throughput.py", "--model", smollm2, "--workload", "mixed", "--rounds", 1, "--out", out
    )
    assert done.returncode == 0, done.stderr
    engines = json.loads(out.read_text())["results"][0]["engines"]
    assert set(engines) == {"samebits", "samebits, switches off"}


def test_a_gpu_that_is_not_there_is_an_error_that_says_so(checkpoint, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr("samebits.kernels.triton.INTERPRETED", False)
    ops.backend.cache_clear()  # a test before this one may have asked for a GPU
    for command in (["generate", checkpoint(), "hello"], ["verify", checkpoint()], ["contract"]):
        done = samebits(*command, "--device", "cuda")
        assert done.returncode == 2
        assert "torch sees no NVIDIA GPU" in done.stderr.replace("\n", " ")


def test_it_tells_its_version():
    done = samebits("--version")
    assert (done.returncode, done.stdout) == (0, f"samebits {__version__}\n")


def test_chat_without_a_template_says_so_before_its_weights_load(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint(), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights")
    for wanted in ("chat messages need a tokenizer", "has no chat template"):
        done = samebits("chat", model, input="hello\n")
        assert done.returncode == 2 and wanted in done.stderr.replace("\n", " "), done.stderr
        assert "you>" not in done.stdout
        add_tokenizer(model)
        (model / "chat_template.jinja").unlink(missing_ok=True)
    add_tokenizer(model)
    done = samebits("chat", model, input="hello\n")
    assert done.returncode == 2 and "model.safetensors" in "".join(done.stderr.split()), "its weights never load"


@pytest.mark.parametrize(("module", "extra"), [("fastapi", "server"), ("uvicorn", "server"), ("torch", None)])
def test_a_missing_extra_is_named_with_the_line_that_installs_it(monkeypatch, capsys, module, extra):
    def fail():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit):
        main.main()
    message = " ".join(capsys.readouterr().err.split())
    assert f"No module named '{module}'" in message
    assert f"pip install 'samebits[{extra}]'" in message if extra else "pip" not in message


def test_a_port_in_use_is_told_before_the_model_loads():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = samebits("serve", "no-such-model", "--port", taken.getsockname()[1])
    assert done.returncode == 2 and "choose another --host or --port" in " ".join(done.stderr.split()), done.stderr
    assert samebits("serve", "no-such-model", "--port", 80000).returncode == 2
    done = samebits("serve", "no-such-model", "--port", 0, "--max-waiting", -5)
    assert done.returncode == 2 and "max_waiting must be at least 0" in done.stderr


def test_two_free_ports_are_two_and_one_number_is_one(monkeypatch):
    found = []
    monkeypatch.setattr("samebits.engine.llm.LLM.__init__", lambda self, model, **settings: None)
    monkeypatch.setattr("samebits.engine.llm.LLM.close", lambda self: None)
    monkeypatch.setattr(
        "samebits.server.serve.serve", lambda llm, name, listeners, *args, **options: found.append(listeners)
    )
    one = str(free_port())
    for options in (["--port", "0"], ["--port", "0", "--control-port", "0"], ["--port", one, "--control-port", one]):
        done = CliRunner().invoke(app, ["serve", "somewhere", *options])
        assert done.exit_code == 0, done.output
    for listeners, count in zip(found, (2, 2, 1), strict=True):
        assert len({listener.getsockname()[1] for listener in listeners}) == len(listeners) == count
        for listener in listeners:
            listener.close()


def test_options_of_a_config_reach_it(monkeypatch):
    seen = {}
    monkeypatch.setattr("samebits.engine.llm.LLM.__init__", lambda self, model, **settings: seen.update(settings))
    monkeypatch.setattr("samebits.server.serve.serve", lambda *args, **options: None)
    monkeypatch.setattr("samebits.engine.llm.LLM.close", lambda self: None)
    options = ["--pp", "2", "--stage-layers", "17,13", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5"]
    done = CliRunner().invoke(app, ["serve", "somewhere", "--port", "0", *options, "--max-num-seqs", "7"])
    assert done.exit_code == 0, done.output
    config = EngineConfig(**seen)
    assert (config.pipeline_parallel_size, config.stage_layers) == (2, (17, 13))
    assert (config.enable_prefix_caching, config.gpu_memory_utilization, config.max_num_seqs) == (False, 0.5, 7)
    assert EngineConfig(**{**seen, "stage_layers": None, "pipeline_parallel_size": 1}).max_num_batched_tokens == 256
    assert CliRunner().invoke(app, ["serve", "somewhere", "--pp", "2", "--stage-layers", "many"]).exit_code == 2
