"""A trainer's end of a weight group with a server."""

from __future__ import annotations

from samebits.engine.weights import WeightGroup, specs_of
from samebits.engine.weights.group import listening_store

from helpers.serving import in_background


class Sender:
    """Rank 0 of a group that the server is asked to join."""

    def __init__(self, server, dialect="sglang", name="g"):
        self.server, self.name = server, name
        store = listening_store("127.0.0.1")
        where = {"master_address": "127.0.0.1", "master_port": str(store.port), "rank_offset": 1, "world_size": 2,
                 "group_name": name, "backend": "gloo"}  # fmt: skip
        routes = {
            "sglang": ("/init_weights_update_group", where),
            "vllm": ("/init_weight_transfer_engine", {"init_info": where}),
        }
        with in_background(server.post, *routes[dialect]) as replies:
            self.group = WeightGroup("127.0.0.1", store.port, 0, 2, name, timeout=4)
        assert replies[0].json()["success"] is True, replies[0].text

    def body(self, state, **more):
        specs = specs_of(state)
        dtypes = [str(s.dtype).removeprefix("torch.") for s in specs]
        lists = {"names": [s.name for s in specs], "dtypes": dtypes, "shapes": [list(s.shape) for s in specs]}
        return {**lists, "group_name": self.name, **more}

    def send(self, state, bucket_bytes=None, **more):
        """The server's reply."""
        body = self.body(state, **more)
        with in_background(self.server.post, "/update_weights_from_distributed", body) as replies:
            self.group.send(state.items(), specs_of(state), bucket_bytes)
        return replies[0]
