"""The savings of drafts: steps and seconds with and without speculation on SmolLM2, every result compared as bits.

python benchmarks/speculation.py [--json FILE] [--driver] [--plot docs/speculation.png]

--driver: instead, the time that drafting takes of a step of 64 sequences. --plot: instead, a plot of tokens a step and
sequence against the share of right drafts, of a drafter that knows the answers and is right that often.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import pathlib
import random
import statistics
import time

from samebits import LLM, SamplingParams

ROUNDS = 5  # of a workload whose prompts or seeds are new each time
CLOSE_ROUNDS = 15  # where a ratio near 1 is to be told from noise
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "What is 17 + 25? Think step by step.",
    "List the first ten prime numbers.",
)
NAMES = ("Ann", "Bob", "Eve")
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs.",
    "How vexingly quick daft zebras jump!",
    "Sphinx of black quartz, judge my vow.",
)


def copy(number: int) -> str:
    """Return a prompt whose answer repeats it: the sentences in an order of this number's."""
    order = random.Random(number).sample(SENTENCES, len(SENTENCES))
    start = " ".join(order[0].split()[:4])
    return f"Copy this text and change nothing: {' '.join(order)}\n{start}"


def edit(number: int) -> str:
    """Return a prompt whose answer is a JSON document with one more field."""
    rng = random.Random(number)
    people = [{"name": name, "age": rng.randrange(20, 80), "id": rng.randrange(10**6)} for name in NAMES]
    before = json.dumps(people)
    return f'Before:\n{before}\nAfter adding "new": true to each entry:\n[{{"name": "Ann",'


def noise(number: int) -> list[list[int]]:
    """Return two prompts of tokens in no order."""
    rng = random.Random(number)
    return [[rng.randrange(10, 49_000) for _ in range(40)] for _ in range(2)]


def generate(llm: LLM, prompts: list, params: list[SamplingParams]) -> tuple[list, int, float]:
    """Return the samples' tokens and log-probs, the steps and the seconds that they took."""
    steps = llm.stats().steps
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    found = [[(c.token_ids, c.logprobs) for c in out.completions] for out in outputs]
    return found, llm.stats().steps - steps, seconds


def driver_share(llm: LLM, prompts: list, seed: int) -> float:
    """Return the share of its steps' time that an engine spends on drafting, for 64 sequences of known prompts.

    seed: 0 for sequences that were seen before, another for new ones.
    """
    speculator = llm.engine.scheduler.speculator
    spent = 0.0

    def timed(method):
        @functools.wraps(method)
        def call(*args):
            nonlocal spent
            start = time.perf_counter()
            result = method(*args)
            spent += time.perf_counter() - start
            return result

        return call

    def params(seed):
        n = 64 // len(prompts)
        return [SamplingParams(n=n, max_tokens=48, seed=100 * seed + i, ignore_eos=True) for i in range(len(prompts))]

    generate(llm, prompts, params(0))
    gc.freeze()  # a collection of all that was imported takes 0.3 s, whoever makes the object that it is due to
    for name in ("begin_step", "draft", "finish"):
        setattr(speculator, name, timed(getattr(speculator, name)))
    before = llm.stats()
    generate(llm, prompts, params(seed))
    after = llm.stats()
    seconds = after.step_seconds - before.step_seconds
    steps = after.steps - before.steps
    drafted = after.draft_tokens - before.draft_tokens
    print(
        f"{steps} steps, {1e3 * seconds / steps:.0f} ms each, {drafted} drafted, {1e3 * spent / steps:.2f} ms drafting"
    )
    for name in ("begin_step", "draft", "finish"):
        delattr(speculator, name)
    return spent / seconds


class Informed:
    """A drafter that knows some texts; each of its tokens is right with a probability of `chance`."""

    def __init__(self, texts: list[list[int]]):
        self.texts = texts
        self.chance = 1.0
        self.rng = random.Random(0)

    def __call__(self, ids: list[int]) -> list[int]:
        """Return what comes next, mostly."""
        text = next((text for text in self.texts if text[: len(ids)] == ids), ids)
        return [token if self.rng.random() < self.chance else token ^ 1 for token in text[len(ids) :]]


def plot(plain: LLM, prompts: list, settings: dict, file: pathlib.Path) -> None:
    """Draw tokens per step and sequence against the share of drafted tokens that were right."""
    from matplotlib.figure import Figure

    params = [SamplingParams(max_tokens=64, seed=i, ignore_eos=True) for i in range(len(prompts))]
    outputs = plain.generate(prompts, params, use_tqdm=False)
    drafter = Informed([out.prompt_token_ids + out.completions[0].token_ids for out in outputs])
    axes = Figure(figsize=(6, 3.6), layout="constrained").subplots()
    for sequences in (1, len(prompts)):
        llm = LLM("smollm2", **settings, speculative_config={"method": drafter, "num_speculative_tokens": 8})
        points = []
        for chance in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0):
            drafter.chance = chance
            before = llm.stats()
            found = llm.generate(prompts[:sequences], params[:sequences], use_tqdm=False)
            assert [o.completions for o in found] == [o.completions for o in outputs[:sequences]], (
                "a draft changed a bit"
            )
            after = llm.stats()
            points.append((chance, 64 / (after.steps - before.steps)))
            print(f"{sequences} sequences, right with {chance}: {points[-1][1]:.2f} tokens a step")
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{sequences} sequence{'s' * (sequences > 1)}")
        llm.close()
    chances = [i / 100 for i in range(30, 101)]
    axes.plot(chances, [sum(c**i for i in range(9)) for c in chances], "--", color="gray", label="always 8 drafted")
    axes.set(xlabel="probability that a drafted token is right", ylabel="tokens per step and sequence")
    axes.legend()
    axes.figure.savefig(file, dpi=120)


def main() -> None:
    """Print a line per workload: steps and seconds without drafts and with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="suffix", choices=("suffix", "ngram"))
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    settings = {"kv_cache_memory_bytes": 600 << 20}
    plain = LLM("smollm2", **settings)
    questions = [plain.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    if args.plot:
        plot(plain, questions, settings, args.plot)
        return
    if args.driver:
        for method, seed in (("suffix", 0), ("suffix", 1), ("ngram", 1)):
            llm = LLM("smollm2", **settings, speculative_config={"method": method})
            kind = "new" if seed else "known"
            print(f"{method}, {kind} sequences: {driver_share(llm, questions, seed):.2%} of a step of 64", flush=True)
            llm.close()
        return
    drafting = LLM("smollm2", **settings, speculative_config={"method": args.method})
    rows = compare(plain, drafting, LLM("smollm2", **settings), questions, args.tokens)
    if args.json:
        args.json.write_text(json.dumps({"method": args.method, "tokens": args.tokens, "rows": rows}, indent=2) + "\n")


def compare(plain: LLM, drafting: LLM, twin: LLM, questions: list, tokens: int) -> list[dict]:
    """Run each workload on two engines, which begin in turn; print and return means, and the rounds' median ratio.

    twin: an engine without drafts, too, whose ratio shows what the machine's noise is.
    """
    streams = [[copy(number)] for number in range(ROUNDS)]
    edits = [[edit(number)] for number in range(ROUNDS)]
    adverse = [noise(number) for number in range(CLOSE_ROUNDS)]
    control = [noise(number) for number in range(CLOSE_ROUNDS, 2 * CLOSE_ROUNDS)]
    workloads = (  # in this order: later ones find the rollouts of earlier ones
        ("new prompts, T=1", [questions], 1.0, 1, 2),
        ("the same seeds again, T=1", [questions], 1.0, 1, 2),
        ("other seeds, T=1", [questions] * CLOSE_ROUNDS, 1.0, 2, 2),
        ("other seeds, T=0.6", [questions] * ROUNDS, 0.6, 3, 2),
        ("one greedy stream that copies", streams, 0.0, 4, 1),
        ("one greedy stream that edits JSON", edits, 0.0, 4, 1),
        ("nothing repeats, T=1.5", adverse, 1.5, 5, 2),
        ("such prompts, without drafts twice", control, 1.5, 5, 2),
    )
    for llm in (plain, drafting, twin):
        generate(llm, noise(-1), [SamplingParams(n=4, max_tokens=16, seed=1, ignore_eos=True)] * 2)
    rows: list[dict] = []
    print("| workload | rounds | steps | with drafts | seconds | with drafts | ratio |\n|---|---|---|---|---|---|---|")
    for place, (name, rounds, temperature, seed, n) in enumerate(workloads):
        other = twin if rounds is control else drafting
        found = []
        for number, prompts in enumerate(rounds):
            params = [
                SamplingParams(
                    n=n, temperature=temperature, max_tokens=tokens, seed=1000 * seed + 10 * number + i, ignore_eos=True
                )
                for i in range(len(prompts))
            ]
            order = [other, plain] if (place + number) % 2 else [plain, other]
            results = {llm is other: generate(llm, prompts, params) for llm in order}
            assert results[True][0] == results[False][0], "a draft changed a bit"
            found.append((*results[False][1:], *results[True][1:]))
        steps, seconds, fewer, less = (sum(column) / len(found) for column in zip(*found, strict=True))
        ratio = statistics.median(row[3] / row[1] for row in found)
        print(
            f"| {name} | {len(rounds)} | {steps:.0f} | {fewer:.0f} | {seconds:.2f} | {less:.2f} | {ratio:.2f} |",
            flush=True,
        )
        values = {"steps": steps, "steps_with_drafts": fewer, "seconds": seconds, "seconds_with_drafts": less}
        rows.append({"workload": name, "rounds": len(rounds), **{k: round(v, 3) for k, v in values.items()}})
        rows[-1]["ratios"] = [round(row[3] / row[1], 3) for row in found]
    return rows


if __name__ == "__main__":
    main()
