"""Which GPUs workers see: what the user lists, or what the environment shows."""

from __future__ import annotations

import pytest

from unisono.launch.gpus import IN_PYTHON, IN_SHELL, choose_gpus, visible_gpus

UUIDS = ("GPU-8932f937-d72c", "GPU-8932aaaa-0000", "GPU-11111111-2222", "GPU-fedc0000-3333")
NAMELESS = ("",) * 4  # of a driver that tells no names


@pytest.mark.parametrize(
    ("text", "environ", "gpus"),
    [
        ("0,3", {}, ("0", "3")),
        (" 3, 0 ", {}, ("3", "0")),
        ("03", {}, ("3",)),
        ("0,3", {"CUDA_VISIBLE_DEVICES": "1"}, ("0", "3")),
        ("GPU-8932f937-d72c,GPU-1", {}, ("GPU-8932f937-d72c", "GPU-1")),
        ("MIG-GPU-89/3/0", {}, ("MIG-GPU-89/3/0",)),
        ("all", {}, ("0", "1", "2", "3")),
        ("all", {"CUDA_VISIBLE_DEVICES": "2,1"}, ("2", "1")),
    ],
)
def test_gpus_are_read(text: str, environ: dict[str, str], gpus: tuple[str, ...]) -> None:
    assert choose_gpus(IN_SHELL, text, environ, UUIDS) == gpus


def test_names_are_believed_where_the_driver_tells_none() -> None:
    assert choose_gpus(IN_SHELL, "GPU-8932,GPU-77", {}, NAMELESS) == ("GPU-8932", "GPU-77")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8932,GPU-77"}, NAMELESS) == (
        "GPU-8932",
        "GPU-77",
    )


@pytest.mark.parametrize(
    ("text", "num_gpus", "words"),
    [
        ("0", 0, "`--gpus` must name GPUs of this machine, but NVIDIA's driver knows of none"),
        ("all", 0, "NVIDIA's driver knows of none"),
        ("0,4", 4, "which has GPUs 0 to 3, but is '0,4'"),
        ("1", 1, "which has only GPU 0, but is '1'"),
        ("0,0", 4, "must name each GPU once, but '0,0' names 0 again"),
        ("0,0", 4, "to have several workers share each GPU, use `--workers-per-gpu 2`."),
        ("GPU-1,GPU-1111", 4, "names GPU-1 again"),
        ("", 4, "must be numbers or names of GPUs with commas between them, `all` or `none`"),
        ("0,", 4, "must be numbers or names of GPUs with commas between them"),
        ("-1", 4, "must be numbers or names"),
        ("0 3", 4, "must be numbers or names"),
        ("cuda:0", 4, "must be numbers or names"),
        ("0,none", 4, "must be numbers or names"),
        ("GPU-8932", 4, "but GPU-8932 is the name, or the beginning of the name, of none or of"),
        ("GPU-77", 4, "but GPU-77 is the name"),
        ("0,GPU-1", 4, "must be all numbers or all names"),
        ("GPU-1,MIG-2", 4, "must be all numbers or all names"),
        ("MIG-1,MIG-2", 4, "must name one MIG instance at most"),
    ],
)
def test_what_names_no_gpus_of_this_machine_is_refused(
    text: str, num_gpus: int, words: str
) -> None:
    with pytest.raises(ValueError) as raised:
        choose_gpus(IN_SHELL, text, {}, UUIDS[:num_gpus])
    assert words in str(raised.value)
    assert str(raised.value).startswith("`--gpus` must ")


def test_in_python_options_have_the_names_of_arguments() -> None:
    with pytest.raises(ValueError, match=r"^`gpus` must name .* use `workers_per_gpu=2`\.$"):
        choose_gpus(IN_PYTHON, "1,1", {}, UUIDS)


def test_gpus_that_are_hidden_from_the_job_stay_hidden() -> None:
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is empty"):
        choose_gpus(IN_SHELL, "all", {"CUDA_VISIBLE_DEVICES": ""}, UUIDS)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,1", ("2", "1")),
        (" 2 , 1 ", ("2", "1")),
        ("0,1,7,2", ("0", "1")),  # no further than what is not there
        ("0,-1,2", ("0",)),
        ("0,,2", ("0",)),
        ("7", ()),
        ("1,1", ()),
        ("1st,+2", ("1st", "+2")),
        ("GPU-8932f,GPU-fe", ("GPU-8932f", "GPU-fe")),
        ("GPU-8932f,GPU-77,GPU-fe", ("GPU-8932f",)),
        ("GPU-8932", ()),  # two begin like this
        ("GPU-fe,0", ("GPU-fe",)),
        ("0,GPU-fe", ("0",)),
        ("GPU-1,GPU-11", ()),
        ("MIG-1,MIG-2", ("MIG-1",)),
    ],
)
def test_a_process_sees_the_gpus_that_cuda_would_show_it(
    text: str | None, seen: tuple[str, ...]
) -> None:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_gpus(environ, UUIDS) == seen
    assert visible_gpus(environ, ()) == ()


@pytest.mark.parametrize(
    "text", ["", "-1", "2,1", "0,1,7,2", "0,-1,2", "1,1", "1st,+2", "GPU-8932f,GPU-fe", "GPU-8932"]
)
def test_torch_counts_as_many(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """torch asks the same library, and reads the variable in Python."""
    import torch

    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: list(UUIDS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert torch.cuda._device_count_nvml() == len(
        visible_gpus({"CUDA_VISIBLE_DEVICES": text}, UUIDS)
    )
