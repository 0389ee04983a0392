"""`--disaggregation auto`: which split is chosen, and what it says where chunked prefill wins."""

from __future__ import annotations

import pytest
from exhaustive import combination

from jaxserve.cli.planning.disaggregation import Chooser, Split
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.simulator.deployments.placement import EngineGoodput


def test_the_split_with_the_greatest_goodput():
    """DistServe's own example (figure 1): two prefill engines to one that decodes."""
    split = Split.of(EngineGoodput(prefill=5.6, decode=10.0, both=1.6), 3)
    assert split[:2] == (2, 1) and split.goodput == 10.0
    assert str(split).startswith("2 prefill and 1 decode replicas: 10 requests/s within the SLO")
    assert str(split).endswith("4.8 of as many that do both")


def test_chunked_prefill_where_it_serves_more():
    split = Split.of(EngineGoodput(prefill=5.6, decode=10.0, both=5.0), 2)
    assert split == (0, 0, 10.0, 5.6)
    assert str(split) == (
        "replicas that do both, with chunked prefill: 10 requests/s within the SLO, "
        "5.6 of the best split"
    )


@pytest.mark.parametrize(
    ("slo", "meets"), [("ttft=2s,itl=100ms", True), combination("ttft=1us", False)]
)
def test_it_is_chosen_by_simulation(slo, meets, monkeypatch):
    """For a described device."""
    monkeypatch.setattr("jaxserve.cli.planning.disaggregation._device", lambda: "l4")
    config = EngineConfig(max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=256)
    choosing = Chooser(slo, None, None)
    if not meets:
        with pytest.raises(ConfigError, match="which no rate of requests meets"):
            choosing.choose(config, 2)
        return
    split = choosing.choose(config, 2)
    assert split.goodput > 0 and split[:2] in ((0, 0), (1, 1))
    assert split.goodput >= split.goodput_otherwise
