"""Text in and out."""

import dataclasses
import itertools
import shutil
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from samebits import SamplingParams
from samebits.engine.detokenizer import TextStream
from samebits.engine.input_processor import InputProcessor
from samebits.engine.request import Request, Sample, SampledToken

from helpers.engines import FREE, PROMPT, VOCAB, generate, one

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def spelling(checkpoint, tmp_path_factory):
    """A checkpoint with a tokenizer: token i is spelled with three letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("spelling") / "model"
    shutil.copytree(checkpoint("llama"), path)
    letters = string.ascii_lowercase
    words = [letters[i // 26 % 26] + letters[i % 26] + letters[25 - i // 676] for i in range(VOCAB)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    core.pre_tokenizer = pre_tokenizers.Split("---", "removed")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(path)
    return path, words


class Pieces:
    """A tokenizer by its pieces."""

    def __init__(self, *pieces):
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def decode(self, ids, skip_special_tokens):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def run_stops(pieces, stop, min_tokens=0):
    """Feeds the pieces one token at a time: (finish text or None, what was shown after each token)."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=100)
    request = Request("r", None, [0], params, 0, (), 1001)
    sample = Sample(request, 0, 100, False)
    request.samples.append(sample)
    tokenizer, shown = Pieces(*pieces), []
    for token in range(len(pieces)):
        sample.append(SampledToken(token, 0.0), 0)
        request.check_stop(sample, tokenizer)
        shown.append(request.take_output(tokenizer).completions[0].text)
        if sample.finish_reason:
            return sample.text, sample.stop_reason, shown
    return None, None, shown


def test_a_stop_string_may_end_behind_tokens_without_text():
    assert run_stops(["xa", "", "", "", "", "b"], "ab")[:2] == ("x", "ab")


def test_a_stop_string_within_min_tokens_does_not_count_later():
    assert run_stops(["A", "x", "y", "B", "z"], ["A", "B"], min_tokens=3)[:2] == ("Axy", "B")


def test_the_earliest_stop_string_of_a_step_counts():
    assert run_stops(["a", "bXcY"], ["Y", "X"])[:2] == ("ab", "X")


def test_streamed_text_only_grows_and_never_shows_part_of_a_stop_string_or_character():
    text, _, shown = run_stops(["one E", "N", "x EN", "\u00e9"[:0], b"\xc3", b"\xa9", "E", "ND"], "END")
    assert text == "one ENx EN\u00e9"
    assert all(b.startswith(a) for a, b in itertools.pairwise(shown))
    assert shown == ["one ", "one ", "one ENx ", "one ENx ", "one ENx ", "one ENx EN\u00e9", "one ENx EN\u00e9", text]


def test_without_a_tokenizer_token_ids_work_and_strings_are_refused_with_advice(llm):
    assert one(llm, PROMPT, SamplingParams(max_tokens=3)).text is None
    for call in (
        lambda: generate(llm, ["hello"], SamplingParams()),
        lambda: generate(llm, "hello", SamplingParams()),
        lambda: llm.chat([{"role": "user", "content": "hello"}], SamplingParams()),
        lambda: generate(llm, [PROMPT], SamplingParams(stop=["x"])),
    ):
        with pytest.raises(ValueError, match=r"a tokenizer, and .* has none; give token ids"):
            call()
    assert not llm.has_unfinished_requests()


def test_a_text_that_a_tokenizer_lacks_is_refused(spelling):
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    processor = InputProcessor(tokenizer, "model", 1, 100, ())
    assert processor.encode("a") == [0]
    for text in ("b", "a\ud800"):
        with pytest.raises(ValueError, match="the tokenizer can't encode the text: "):
            processor.process(text, SamplingParams(), "r", False)


def test_a_stop_string_is_cut_from_the_text_and_its_tokens_stay(shared, spelling, free):
    path, words = spelling
    llm = shared(path)
    whole = one(llm, PROMPT, FREE)
    assert (whole.token_ids, whole.text) == (free, "".join(words[t] for t in free))
    stop = words[free[4]][1:] + words[free[5]] + words[free[6]][:1]  # from within a token to within a token
    completion = one(llm, PROMPT, dataclasses.replace(FREE, stop=["no such", stop]))
    assert completion.token_ids == free[:7]
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.logprobs == whole.logprobs[:7]


def test_skip_tokenizer_init_reads_no_tokenizer(shared, spelling):
    llm = shared(spelling[0], skip_tokenizer_init=True)
    assert one(llm, PROMPT, SamplingParams(max_tokens=3)).text is None
    with pytest.raises(ValueError, match="string prompts need a tokenizer"):
        generate(llm, "hello", SamplingParams())


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_an_end_that_may_become_a_stop_string_is_held_back(text, stop):
    stream = TextStream(None)
    stream.text = text
    starts = {each[:size] for each in stop for size in range(1, len(each))}
    held = max((size for size in range(1, len(text) + 1) if text[-size:] in starts), default=0)
    assert stream.shown(stop) == text[: len(text) - held]


def test_stop_strings_cost_little_whatever_they_are():
    """A server's 64 with 1,024 characters, looked for in the text of each sample at each step."""
    stream = TextStream(None)
    stream.text = "no end " * 3000
    stop = ["ö" * 961, *(chr(200 + i) for i in range(63))]
    seconds = []
    for _ in range(5):
        begin = time.thread_time()
        stream.shown(stop)
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 2e-3
