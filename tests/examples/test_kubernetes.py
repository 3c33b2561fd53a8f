"""The manifests for Kubernetes agree with the code and with their page."""

import inspect
import re
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckpt
from inprocess.fault_tolerance.config_cli import NO_RESTART_EXIT_CODE
from inprocess.fault_tolerance.launcher.options import parse

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "examples" / "kubernetes"
PAGE = (REPOSITORY / "docs" / "kubernetes.md").read_text()
_WATCHER = inspect.signature(ckpt.PreemptionWatcher).parameters
_ASKED_TO_STOP = _WATCHER["exit_code"].default
_GRACE: timedelta = _WATCHER["grace"].default
_STOPPED = 128 + signal.SIGTERM
_VARIABLES = {"RANK": "1", "MASTER_ADDR": "run8-master-0", "MASTER_PORT": "23456"}  # of the training operator
_PET = {
    "NNODES": "2",
    "NPROC_PER_NODE": "8",
    "NODE_RANK": "1",
    "MASTER_ADDR": "run9-node-0-0.run9",
    "MASTER_PORT": "29500",
}
_LEAST_S = _GRACE.total_seconds() + 5  # the page's formula; there is no preStop hook


@pytest.fixture(autouse=True)
def _variables_of_a_train_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the controller of TrainJobs adds to the environment of a container. Arguments count more."""
    for name, value in _PET.items():
        monkeypatch.setenv(f"PET_{name}", value)


def _manifest(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def _runtime_and_train_job() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, train_job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    return runtime, train_job


def _job_set(name: str) -> dict[str, Any]:
    """The spec of the JobSet of a manifest."""
    spec = (
        _runtime_and_train_job()[0]["spec"]["template"]["spec"] if name == "trainjob.yaml" else _manifest(name)["spec"]
    )
    assert isinstance(spec, dict)
    return spec


def _job(name: str = "jobset.yaml") -> dict[str, Any]:
    (replicated,) = _job_set(name)["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]
    return found


def _pods() -> dict[str, dict[str, Any]]:
    roles = _manifest("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    node = _job("trainjob.yaml")["template"]["spec"]
    node["containers"][0]["command"] = _runtime_and_train_job()[1]["spec"]["trainer"]["command"]
    pods = {"trainer": _job()["template"]["spec"], "node": node}
    return pods | {name: role["template"]["spec"] for name, role in roles.items()}


def _gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


def _options_of(pod: dict[str, Any]) -> Any:
    """What the launcher makes of the command of a pod's container."""
    (container,) = pod["containers"]
    program, *arguments = container["command"]
    assert program == "ckpt_launcher"
    return parse([re.sub(r"\$\((\w+)\)", lambda found: _VARIABLES[found[1]], each) for each in arguments])


def test_each_manifest_is_on_the_page() -> None:
    manifests = {path.name for path in FOLDER.iterdir()}
    assert manifests == set(re.findall(r"\]\(\.\./examples/kubernetes/(\S+)\)", PAGE))


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_the_failure_policy_knows_the_exit_codes(name: str) -> None:
    job = _job(name)
    rules = job["podFailurePolicy"]["rules"]
    codes = {rule["onExitCodes"]["values"][0]: rule for rule in rules if "onExitCodes" in rule}
    assert codes[NO_RESTART_EXIT_CODE]["action"] == "FailJob"
    assert codes[NO_RESTART_EXIT_CODE]["onExitCodes"]["values"] == [NO_RESTART_EXIT_CODE]
    assert codes[_STOPPED]["action"] == "Ignore"
    assert codes[_STOPPED]["onExitCodes"]["values"] == [_STOPPED, _ASKED_TO_STOP]
    names = {container["name"] for container in job["template"]["spec"]["containers"]}
    assert {rule["onExitCodes"]["containerName"] for rule in codes.values()} == names
    (conditions,) = (rule["onPodConditions"] for rule in rules if "onPodConditions" in rule)
    assert conditions == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # Kubernetes refuses the policy otherwise
    (rule,) = _job_set(name)["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_restart_policies_by_exit_code_start_again_what_was_asked_to_stop() -> None:
    roles = _manifest("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    assert {role["restartPolicy"] for role in roles.values()} == {"ExitCode"}
    assert NO_RESTART_EXIT_CODE < 128 <= _STOPPED  # the operator ends the job below 128


def test_the_page_has_the_exit_codes() -> None:
    found = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert found == {0, 1, _ASKED_TO_STOP, NO_RESTART_EXIT_CODE, _STOPPED, 128 + signal.SIGKILL}


@pytest.mark.parametrize("name", ["trainer", "node", "Master", "Worker"])
def test_a_pod(name: str) -> None:
    pod = _pods()[name]
    (container,) = pod["containers"]
    arguments, options = _options_of(pod)
    grace_s = pod["terminationGracePeriodSeconds"]
    assert "lifecycle" not in container  # a preStop hook would count for the time
    assert grace_s > options.term_timeout_s >= _LEAST_S
    assert arguments.training_script == "examples/preemption.py"
    root = next(each.removeprefix("--root=") for each in container["command"] if each.startswith("--root="))
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert "persistentVolumeClaim" in volumes[mounts[str(Path(root).parent)]]
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    memory = container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["memory"] == memory
    ranks = int(arguments.nproc_per_node)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
    example = re.search(r"For (\d+) ranks with (\d+) GiB of trainers, (\d+) GiB of shares", PAGE)
    assert example is not None
    assert int(example[1]) == ranks
    needed = ranks * (int(example[2]) + 2 * int(example[3]) + 0.1) + _gibibytes(shm["sizeLimit"])
    assert f"= {needed:.0f} GiB" in PAGE
    assert needed <= _gibibytes(memory)


def test_the_nodes_meet_at_the_first_pod() -> None:
    manifest = _manifest("jobset.yaml")
    arguments, _ = _options_of(_job()["template"]["spec"])
    (replicated,) = manifest["spec"]["replicatedJobs"]
    network = manifest["spec"]["network"]
    host, _, _ = arguments.rdzv_endpoint.partition(":")
    assert network["enableDNSHostnames"]
    assert host == f"{manifest['metadata']['name']}-{replicated['name']}-0-0.{network['subdomain']}"
    assert int(arguments.nnodes) == _job()["completions"] == _job()["parallelism"]
    roles = _manifest("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"].values()
    arguments, _ = _options_of(_pods()["Worker"])
    assert int(arguments.nnodes) == sum(role["replicas"] for role in roles)
    assert (arguments.node_rank, arguments.master_addr) == (1, _VARIABLES["MASTER_ADDR"])


def test_a_train_job_finds_its_runtime_and_its_first_pod() -> None:
    runtime, train_job = _runtime_and_train_job()
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (
        train_job["spec"]["runtimeRef"].items()
        >= {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}.items()
    )
    assert train_job["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert "torch" in runtime["spec"]["mlPolicy"]
    # What the controller looks for: the label of the job, its one replica, and the name of its container.
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    names = [container["name"] for container in replicated["template"]["spec"]["template"]["spec"]["containers"]]
    assert (replicated["template"]["metadata"]["labels"], replicated["replicas"], names) == (labels, 1, ["node"])
    arguments, _ = _options_of(_pods()["node"])
    trainer, name = train_job["spec"]["trainer"], train_job["metadata"]["name"]
    assert (int(arguments.nnodes), int(arguments.nproc_per_node)) == (trainer["numNodes"], trainer["numProcPerNode"])
    assert (arguments.node_rank, arguments.master_addr) == (1, f"{name}-{replicated['name']}-0-0.{name}")


_SAVE = """
import sys, torch
import ckpt
with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save({"weight": torch.zeros(1_000_000)}, 1)
"""


@pytest.mark.timeout(120)
def test_saves_need_no_room_in_dev_shm(tmp_path: Path) -> None:
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*mount, sys.executable, "-c", _SAVE, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert ckpt.Checkpointer(tmp_path / "run", read_only=True).latest_step() == 1
