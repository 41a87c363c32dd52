"""The admission policies: accounts that write to the API server can write what canaryd writes, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from canaryd.action import label, taint
from canaryd.action.taint import Selector, rule_for
from tests.action.test_label import POLICY as LABELS
from tests.action.test_taint import ITEM
from tests.action.test_taint import POLICY as TAINTS
from tests.api_server import COMPONENTS, Policy, merge

pytest.importorskip("celpy", reason="NOT TESTED: cel-python is not here, so no policy was evaluated")
RULE = rule_for(Selector("gpu.nvidia.com", "node-1", "gpu-1"), "node-1", ITEM)
POD = {
    "metadata": {
        "name": "a",
        "labels": {"app": "vllm"},
        "annotations": {"a": "b"},
        "finalizers": ["a/b"],
        "ownerReferences": [{"kind": "ReplicaSet", "name": "a"}],
    },
    "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
    "status": {"phase": "Running"},
}


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


def test_the_label_may_be_written_changed_and_removed():
    """Also on a pod without any other."""
    bare = but(POD, metadata={"labels": None, "annotations": None, "finalizers": None, "ownerReferences": None})
    for pod in (POD, bare):
        values = [but(pod, metadata={"labels": {label.KEY: value}}) for value in (None, "true", "pending", "false")]
        for old, new in ((old, new) for old in (*values, pod) for new in values):
            assert LABELS.refusal("UPDATE", "/pods", new, old) == ""


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"spec": {"containers": [{"name": "vllm", "image": "another"}]}}, "what a pod runs"),
        ({"spec": {"tolerations": [{"operator": "Exists"}]}}, "what a pod runs"),
        *(
            ({"metadata": {"labels": labels}}, "no label but")
            for labels in ({"app": "x"}, {"app": None}, {"x": "y"}, None)
        ),
        *(({"metadata": {"annotations": each}}, "annotations") for each in ({"a": "x"}, {"x": "y"}, None)),
        *(({"metadata": {"finalizers": each}}, "finalizers") for each in (["x/y"], None)),
        *(({"metadata": {"ownerReferences": each}}, "owners") for each in ([{"kind": "Job", "name": "a"}], None)),
    ],
)
def test_nothing_else_of_a_pod_may_change(changed, says):
    """The role alone would let it change the image; another account may."""
    for old, new in ((POD, but(POD, **changed)), (but(POD, **changed), POD)):
        assert says in LABELS.refusal("UPDATE", "/pods", new, old)
        another = Policy(COMPONENTS / "pod-label/policy.yaml", "system:serviceaccount:serving:another")
        assert another.refusal("UPDATE", "/pods", new, old) == ""
