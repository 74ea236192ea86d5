"""The comparison that plug-ins make: log-probs as bits, and a difference that is named."""

import pytest
import torch

from samebits import NumericsError
from samebits.trainer import check_same_bits


def never(*place: int) -> str:
    raise AssertionError(f"nothing differs, and yet {place} was to be named")


def named(row: int, token: int) -> str:
    return f"token {token} of row {row}"


def test_equal_bits_are_counted_and_what_is_masked_may_differ():
    rollout = torch.tensor([[-0.5, -1.25, float("nan")], [-2.0, 0.0, -0.125]])
    trainer = rollout.clone()
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    trainer[1, 1] = -7.0
    assert check_same_bits(rollout, trainer, mask, never) == 5
    assert check_same_bits(rollout.T, trainer.T, mask.T, never) == 5  # of any strides


@pytest.mark.parametrize("other", [torch.nextafter(torch.tensor(-2.0), torch.tensor(0.0)).item(), float("nan"), -3.0])
def test_one_bit_is_found_and_its_place_is_named(other):
    rollout = torch.tensor([[-0.5, -1.25], [-2.0, -0.125]])
    trainer = rollout.clone()
    trainer[1, 0] = other
    message = rf"1 of 4 tokens .* token 0 of row 1: -2 in the rollout, {other:.9g} in the trainer"
    with pytest.raises(NumericsError, match=message):
        check_same_bits(rollout, trainer, torch.ones(2, 2), named)


def test_zeros_of_two_signs_differ():
    with pytest.raises(NumericsError, match="0 in the rollout, -0 in the trainer"):
        check_same_bits(torch.zeros(1), torch.tensor([-0.0]), torch.ones(1), "token {}".format)
