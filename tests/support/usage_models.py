"""The names of `zoo` that were here."""

from tests.support.zoo import *  # noqa: F403
from tests.support.zoo import SelfAttention as Attention  # noqa: F401
