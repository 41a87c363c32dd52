"""The admission policies: accounts that write to the API server can write what canaryd writes, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from canaryd.action import taint
from canaryd.action.taint import Selector, rule_for
from tests.action.test_taint import ITEM
from tests.action.test_taint import POLICY as TAINTS
from tests.api_server import COMPONENTS, Policy, merge

pytest.importorskip("celpy", reason="NOT TESTED: cel-python is not here, so no policy was evaluated")
RULE = rule_for(Selector("gpu.nvidia.com", "node-1", "gpu-1"), "node-1", ITEM)


def but(made: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a copy with a merge patch."""
    changed = copy.deepcopy(made)
    merge(changed, parts)
    return changed


def test_a_rule_of_its_own_may_be_written_raised_and_deleted():
    """What the process does."""
    raised = but(RULE, spec={"taint": {"effect": "NoExecute"}})
    for asked in (("CREATE", RULE, None), ("UPDATE", raised, RULE), ("DELETE", None, raised)):
        assert TAINTS.refusal(asked[0], "resource.k8s.io/devicetaintrules", *asked[1:]) == ""


WIDE = [{name: value} for name in Selector._fields for value in ("", None)]
OTHERS = [
    but(RULE, spec={"taint": {"key": "gpu.nvidia.com/xid"}}),
    but(RULE, metadata={"annotations": {taint.NODE: None}}),
    but(RULE, metadata={"annotations": None}),
]


@pytest.mark.parametrize(
    ("new", "says"),
    [
        *((but(RULE, spec={"deviceSelector": part}), "a driver, a pool and a device") for part in WIDE),
        (but(RULE, spec={"deviceSelector": None}), "a driver, a pool and a device"),
        *((other, "the key canaryd.io/faulty and the annotation") for other in OTHERS),
    ],
)
def test_no_rule_may_select_more_than_one_device_or_be_anothers(new, says):
    """Neither a new one nor one that is changed; another account may."""
    for operation, old in (("CREATE", None), ("UPDATE", RULE)):
        assert says in TAINTS.refusal(operation, "resource.k8s.io/devicetaintrules", new, old)
        another = Policy(COMPONENTS / "device-taint/policy.yaml", "system:serviceaccount:kube-system:another")
        assert another.refusal(operation, "resource.k8s.io/devicetaintrules", new, old) == ""


@pytest.mark.parametrize("old", OTHERS)
def test_a_rule_of_another_may_be_neither_taken_over_nor_deleted(old):
    """A driver's or an operator's own."""
    for operation, new in (("UPDATE", RULE), ("DELETE", None)):
        assert "not canaryd's" in TAINTS.refusal(operation, "resource.k8s.io/devicetaintrules", new, old)
