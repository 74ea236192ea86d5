"""verl on exact rollouts: `actor_rollout_ref.rollout.name=samebits`, and an FSDP2 engine whose log-probs are theirs.

    VERL_ENGINE_VENDOR=samebits python -m verl.trainer.main_ppo \\
        actor_rollout_ref.rollout.name=samebits actor_rollout_ref.actor.strategy=fsdp2 ...

verl loads this module by itself, through the entry point group `verl.plugins`, and enters into its registries a
rollout engine (`rollout`), a trainer's engine and a trainer mode whose runs repeat (`trainer`), and a platform for
machines without an accelerator (`platform`). verl is unmodified. docs/verl.md has all settings.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module

from .limits import NAME

SUPPORTED = "verl>=0.9.1,<0.10"


def register() -> None:
    """Enter samebits into verl's registries. Raises ImportError, saying what to install, where one is missing.

    Runs with other engines wait for little of this: the rollouts' side is imported when verl asks for it, the trainer's
    side, which loads all of verl's FSDP code, where VERL_ENGINE_VENDOR or VERL_PLATFORM does.
    """
    import verl  # first: a module that it imports meanwhile may import this package's, whoever came first

    try:
        from . import platform  # noqa: F401, I001 - first: the others ask verl for it

        # All that the rollouts' side takes of verl: what is missing is named now, with verl's version.
        from verl.utils.fs import copy_to_local  # noqa: F401
        from verl.utils.py_functional import convert_to_regular_types  # noqa: F401
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout  # noqa: F401
        from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: F401

        RolloutReplicaRegistry.register(NAME, lambda: import_module(".rollout", __name__).Replica)
        _ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.rollout.ServerAdapter"
        if os.environ.get("VERL_ENGINE_VENDOR") == NAME or os.environ.get("VERL_PLATFORM") == "cpu":
            from . import trainer  # noqa: F401
    except (ImportError, AttributeError, TypeError) as error:
        problem = f"this verl is {verl.__version__}, samebits.integrations.verl needs {SUPPORTED}: {error}"
        if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] != "verl":
            problem = f"{error}: pip install 'samebits[verl]'"
        logging.getLogger(__name__).warning("%s", problem)  # verl keeps what plug-ins raise to itself
        raise ImportError(problem) from error


register()
