"""An engine under verl whose log-probs are wrong by a bit, for a run that has to notice."""

from __future__ import annotations

from typing import Any

import torch

from samebits.integrations.verl import rollout


class Bent(rollout.Server):
    """A server whose third token of each answer has a log-prob next to the right one."""

    def _token_output(self, output: Any) -> Any:
        found = super()._token_output(output)
        if len(found.log_probs) > 2:
            below = torch.nextafter(torch.tensor(found.log_probs[2]), torch.tensor(-torch.inf))
            found.log_probs[2] = below.item()
        return found


rollout.Server = Bent
