"""The names of `zoo` that were here."""

from tests.support.zoo import FLOOR_NUMEL, FLOORS, HIDDEN, ROOT_NUMEL, Floor, Tower, tower_loss  # noqa: F401
from tests.support.zoo import TOWER_FEATURES as FEATURES  # noqa: F401
