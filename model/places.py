"""The places in a model's modules where something was read, so that it is read again only after a change."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn


class Places:
    """A list of where its methods found what they returned, for `unchanged` to look there again."""

    def __init__(self) -> None:
        self._found: list[tuple[dict[str, Any], str, Any]] = []
        self._passing: list[tuple[dict[str, Any], str, weakref.ref]] = []
        self._addresses: list[tuple[Tensor, int]] = []
        self._hooks: list[dict[int, Any]] = []

    def attribute(self, names: Any, name: str) -> Any:
        """Return what a namespace, such as a module's `__dict__`, has under a name, or None."""
        found = names.get(name)
        self._found.append((names, name, found))
        return found

    def passing(self, names: Any, name: str) -> Any:
        """Return the same, which these notes don't keep alive."""
        found = names.get(name)
        if found is None:
            return self.attribute(names, name)
        self._passing.append((names, name, weakref.ref(found)))
        return found

    def watch(self, hooks: dict[int, Any]) -> None:
        """Have a module's hooks count as a change."""
        self._hooks.append(hooks)

    def module(self, parent: nn.Module, name: str) -> Any:
        """Return a submodule, or None."""
        found = self.attribute(parent._modules, name)
        if found is not None:
            self._hooks += [found._forward_hooks, found._forward_pre_hooks]
        return found

    def parameter(self, module: nn.Module, name: str) -> Any:
        """Return a parameter, detached, or None."""
        found = self.attribute(module._parameters, name)
        if found is None:
            return None
        self._addresses.append((found, found.data_ptr()))  # an update replaces its memory
        return found.detach()

    def unchanged(self) -> bool:
        """True if all is where it was found, and nobody watches a module."""
        if any(self._hooks):
            return False
        for names, name, found in self._found:
            if names.get(name) is not found:
                return False
        for names, name, reference in self._passing:
            if (found := reference()) is None or names.get(name) is not found:
                return False
        return all(tensor.data_ptr() == address for tensor, address in self._addresses)
