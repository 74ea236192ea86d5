"""A server for tests: a tiny model with a byte-level tokenizer, served by a thread of this process."""

from __future__ import annotations

import ctypes
import random
import shutil
import socket
import threading

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from samebits import LLM
from samebits.server import create_app
from samebits.server.serve import Server, take_address

from helpers.waiting import in_background as in_background
from helpers.waiting import wait_for as wait_for

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def add_tokenizer(path, vocab_size: int = 1001) -> None:
    """Ids 3 to 258 are the bytes, those above are random strings of bytes, seldom whole characters."""
    alphabet, rng = sorted(pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
    words = {word: 3 + i for i, word in enumerate(alphabet)}
    while len(words) < vocab_size - 3:
        words.setdefault("".join(rng.choices(alphabet, k=rng.randint(2, 4))), 3 + len(words))
    special = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    core = Tokenizer(models.BPE({**special, **words}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)


def served_checkpoint(checkpoint, folder):
    """A copy of a tiny checkpoint, with the tokenizer."""
    shutil.copytree(checkpoint, folder)
    add_tokenizer(folder)
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Serving:
    """A running server. `service` and `engine` are its insides, for what can't be seen from outside."""

    def __init__(self, path, llm: dict | None = None, control: bool = False, name: str = "tiny", **options):
        settings = {"kv_cache_memory_bytes": 2**22, "max_num_seqs": 16} | (llm or {})
        self.llm = LLM(path, **settings)
        self.app = create_app(self.llm, name, **options)
        self.server = Server(self.app)
        listeners = [take_address("127.0.0.1", 0)]
        if control:  # as `serve` does without an admin key
            listeners.append(take_address("127.0.0.1", 0))
            options["guard"].control_port = listeners[1].getsockname()[1]
        self.port, self.control_port = listeners[0].getsockname()[1], listeners[-1].getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=(listeners,), daemon=True)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Serving:
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.service = self.app.state.service
        self.engine = self.service.engine
        self.http = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *exc) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(30)
        self.llm.close()
        assert not self.thread.is_alive(), "the server did not stop"

    def post(self, path: str, body=None, **options) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def ok(self, path: str, body=None, **options):
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str):
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def kill_engine_thread(self) -> None:
        """The nearest to a kill that a thread knows: SystemExit, wherever it is."""
        ident = ctypes.c_ulong(self.engine.thread.ident)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1

    def idle(self) -> None:
        """Waits until nothing runs and no KV block is held."""
        wait_for(lambda: self.engine.num_sequences == 0 and self.llm.stats().kv_blocks_used == 0)
        assert not self.engine.generations and not self.engine.by_engine_id and not self.llm.unfinished_request_ids
