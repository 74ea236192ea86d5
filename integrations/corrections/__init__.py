"""Correction settings of other trainers, translated into ours, and of four of them back.

`from_*` translate what a framework documents; `notes` say where its code or its defaults differ (docs/corrections.md).
`to_*` write the weight and the gates. They leave out the denominator, which these settings can't choose: `from_*` of
what they return notes the framework's own. All raise ValueError for unknown settings and for what can't be expressed.
"""

from .areal import from_areal
from .common import Translated
from .miles import from_miles, from_slime, to_miles, to_slime
from .plain import from_plain, in_words
from .prime_rl import from_prime_rl
from .skyrl import from_skyrl
from .trl import from_trl, to_trl
from .verl import from_verl, to_verl

__all__ = [
    "Translated",
    "from_areal",
    "from_miles",
    "from_plain",
    "from_prime_rl",
    "from_skyrl",
    "from_slime",
    "from_trl",
    "from_verl",
    "in_words",
    "to_miles",
    "to_slime",
    "to_trl",
    "to_verl",
]
