"""What a page says of getting the same result is typed into a shell, and gives it."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.tools.report.files import write_report

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, torch, unisono
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
loss = lambda model, batch: model(batch[0]).square().mean()
trainer = unisono.Trainer(
    model, torch.optim.Adam(model.parameters()), loss, shards=2, directory=sys.argv[1]
)
trainer.fit(torch.utils.data.TensorDataset(torch.randn(40, 3)), batch_size=8, epochs=2)
"""


@pytest.mark.parametrize("start", [["unisono", "run", "-n", "2"], ["python"]], ids=" ".join)
@pytest.mark.parametrize("directory", ["run", "a folder/it's a run"])
def test_the_commands_of_a_page_train_once_more_to_the_same_digest(tmp_path, start, directory):
    (tmp_path / "a program.py").write_text(PROGRAM)
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    called = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True, "check": True}
    first = subprocess.run([*start, "a program.py", directory], **called)
    page = write_report(tmp_path / directory).read_text()
    (commands,) = re.findall(r"^<pre>(cd .*?)</pre>$", page, re.S | re.M)
    again = subprocess.run(["sh", "-e", "-c", html.unescape(commands)], **called)
    digests = [re.findall(r"digest (\w+)", done.stdout + done.stderr) for done in (first, again)]
    assert digests[0] == digests[1] != []
    assert "10 steps" in again.stdout + again.stderr  # all of them
    moved = tmp_path / f"{directory}-before"
    assert (moved / "report.html").is_file()
