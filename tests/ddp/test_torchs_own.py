"""The script that runs torch's own tests; all of them run in ``make test-torch``."""

import sys

import pytest
from tests.ddp.torchs_own.expected import expected_failures
from tests.ddp.torchs_own.which import NEEDS_ACCELERATOR, names_of_tests, why_left_out
from tests.warm import processes

SOURCE = """
class DistributedTest:
    class _DistTestBase:
        def test_direct(self):
            DistributedDataParallel(1)

        def test_through_a_method(self):
            self._one()

        def _one(self):
            self._other()

        def _other(self):
            self._one()
            torch.nn.parallel.DistributedDataParallel(1)

        def test_of_something_else(self):
            self._nothing()

        def _nothing(self):
            pass
"""


def test_tests_that_make_a_ddp_are_found(tmp_path):
    file = tmp_path / "tests.py"
    file.write_text(SOURCE)
    assert names_of_tests(str(file)) == ["test_direct", "test_through_a_method"]


def test_only_known_reasons_leave_a_test_out():
    assert "SyncBatchNorm" in why_left_out("test_ddp_inference")
    assert why_left_out("test_ddp_uneven_inputs") == ""
    assert all(NEEDS_ACCELERATOR.values())


def test_little_may_fail():
    for combination in [("unisono", "ours", 3), ("gloo", "ours", 3), ("gloo", "torch", 2)]:
        assert len(expected_failures(*combination)) <= 2


@pytest.mark.long
def test_what_fails_and_was_not_expected_to_is_told():
    command = [sys.executable, "-m", "tests.ddp.torchs_own", "-n", "2", "-k"]
    good = processes.run([*command, "no_grad|powerSGD$"])
    assert good.returncode == 0, good.stdout + good.stderr
    assert "unisono   ours" in good.stdout
    bad = processes.run([*command, "returns_tensor_with_no_grad", "--backend", "no-such-backend"])
    assert bad.returncode == 1
    assert "NOT EXPECTED: test_ddp_returns_tensor_with_no_grad on no-such-backend" in bad.stdout
