"""Plans of tensor parallelism: read, and what cannot be split is one error before anything is changed."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from nbdist.strategies import plans
from tests.transformer import Transformer


def test_patterns_names_and_objects() -> None:
    given = {
        "blocks.*.up": "colwise",
        "blocks.*.down": RowwiseParallel,
        "blocks.1.up": "replicate",  # a name counts more than a pattern, wherever it stands
        "norm": SequenceParallel(),
        "head": None,
    }
    styles = plans.read(Transformer(), given, 2)
    assert {name: type(style) for name, style in styles.items()} == {
        "blocks.0.up": ColwiseParallel,
        "blocks.0.down": RowwiseParallel,
        "blocks.1.down": RowwiseParallel,
        "norm": SequenceParallel,
    }
    assert styles["norm"] is not given["norm"]  # torch writes into it


def test_the_plan_that_a_model_brings() -> None:
    model = Transformer()
    assert len(plans.read(model, None, 4)) == 13
    assert plans.read(model, "auto", 4).keys() == plans.read(model, None, 4).keys()
    own = nn.Sequential(nn.Linear(4, 4))
    vars(own)["_tp_plan"] = {"0": "colwise"}
    assert list(plans.read(own, None, 2)) == ["0"]
    vars(own)["_tp_plan"] = {"0": "colwise", "experts.*.up": "colwise"}  # written for all models of its kind
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        assert list(plans.read(own, None, 2)) == ["0"]
    assert "experts.*.up" in str(noted[0].message)


def test_no_plan_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"Sequential says nowhere how .* not guessed: give the model .*tp_plan"):
        plans.read(nn.Sequential(nn.Linear(2, 2)), None, 2)


def test_all_that_is_wrong_in_one_error() -> None:
    model = Transformer(width=18, heads=3)
    given = {
        "blocks.*.attn.q_proj": "colwise",
        "blocks.*.up.weight": "colwise",
        "blocks.*.attention.q_proj": "colwise",
        "blocks.*.norm": "rowwise",
        "blocks.*.before": "rowwise",
        "embedding": "packed",
        "head": "rowwise",
    }
    before = {name: id(one) for name, one in model.named_parameters()}
    with pytest.raises(ValueError) as caught:
        plans.read(model, given, 4)
    told = str(caught.value)
    assert re.match("Transformer cannot be split over 4 tensor parallel ranks by the plan that was given: ", told)
    for part in (
        "'blocks.*.attn.q_proj' matches no module; there is 'blocks.*.attention.q_proj'",
        "'blocks.*.up.weight' names a parameter, and a plan names modules",
        "blocks.0.attention.q_proj: its out_features 18 cannot be divided by 4",
        "'blocks.*.norm' matches no module",
        "blocks.1.before: RowwiseParallel splits Linear and Embedding, and this is LayerNorm",
        "embedding: the style 'packed' is none of torch.distributed.tensor.parallel's; known by name are 'colwise'",
        "head: its in_features 18 cannot be divided by 4",
    ):
        assert part in told
    assert {name: id(one) for name, one in model.named_parameters()} == before


def test_heads_stay_whole() -> None:
    model = Transformer(width=18, heads=3)  # 18 features can be divided by 2
    with pytest.raises(ValueError, match=r"q_proj: its 3 heads of 6 cannot be divided by 2"):
        plans.read(model, None, 2)
    for block in model.blocks:
        del block.attention.head_dim
    with pytest.raises(ValueError, match=r"q_proj: the num_heads 3 of Attention cannot be divided by 2"):
        plans.read(model, None, 2)


def test_what_computes_with_weights_without_a_call() -> None:
    whole = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(ValueError, match=r"self_attn\.out_proj: MultiheadAttention computes with its weights"):
        plans.read(whole, {"self_attn.out_proj": "rowwise"}, 2)
    made = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="0: ColwiseParallel splits its weight, which is made of others"):
        plans.read(made, {"0": "colwise"}, 2)


def test_tied_weights_are_split_in_one_way() -> None:
    styles = plans.read(Transformer(tied=True), None, 2)
    assert isinstance(styles["embedding"], RowwiseParallel)  # the way of the head's
    both = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both[1].weight = both[0].weight
    with pytest.raises(ValueError, match=r"1\.weight and 0 share one weight"):
        plans.read(both, {"0": "colwise"}, 2)
    with pytest.raises(ValueError, match=r"1\.weight and 0 share one weight"):
        plans.read(both, {"0": "colwise", "1": "rowwise"}, 2)
    assert len(plans.read(both, {"0": "colwise", "1": "colwise"}, 2)) == 2


def test_what_is_no_plan() -> None:
    for given in (["up"], 3):
        with pytest.raises(TypeError, match="the tensor parallel plan"):
            plans.read(Transformer(), given, 2)
    with pytest.raises(TypeError, match="a style of the tensor parallel plan"):
        plans.read(Transformer(), {"head": 3}, 2)
    with pytest.raises(ValueError, match="it splits nothing"):
        plans.read(Transformer(), {"head": "replicate"}, 2)
