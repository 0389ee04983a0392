"""What devices cost: a file that the user owns."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

from jaxserve.core.errors import ConfigError


def read_prices(path: Path, devices: Sequence[str]) -> dict[str, float]:
    """Price of one device for one hour, by the names of `devices`, from a TOML file with lines such
    as `h200 = 3.50`.

    Raises ConfigError for a file that is not like that, or has no price of a device.
    """
    try:
        prices = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"prices {str(path)!r} cannot be read: {error}.") from error
    for device in devices:
        price = prices.get(device)
        if type(price) not in (int, float) or not 0 < price < math.inf:
            given = "no price" if price is None else f"the price {price!r}"
            raise ConfigError(
                f"prices {str(path)!r} has {given} of {device!r}; give that of one device for an "
                f'hour, such as "{device}" = 3.50.'
            )
    return {device: float(prices[device]) for device in devices}
