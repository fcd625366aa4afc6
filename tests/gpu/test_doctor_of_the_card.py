from __future__ import annotations

import pytest
import torch
from gpu_places import Place

from cepo.commands.cli import main
from cepo.commands.machine import machine_findings, usable_gpus
from cepo.hardware import driver_version


def test_the_doctor_names_each_card_and_its_driver(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code = main(["doctor"])
    printed = capsys.readouterr().out
    assert "torch" in printed
    assert code == 0 or "fail" in printed
    gpus = usable_gpus()
    findings = {finding.subject.strip(): finding for finding in machine_findings(gpus)}
    assert len(gpus) == torch.cuda.device_count()
    if place.device == "cpu":
        assert "GPU 0" not in findings
        assert findings["torch's build"].mark in ("ok", "warn", "info")
        return
    assert torch.cuda.get_device_name(0) in printed
    major, minor = torch.cuda.get_device_capability(0)
    card = findings["GPU 0"]
    assert card.mark == "ok", card
    assert torch.cuda.get_device_name(0) in card.found
    assert f"compute capability {major}.{minor}" in card.found
    assert gpus[0].total == torch.cuda.get_device_properties(0).total_memory
    assert str(driver_version()) in findings["torch's build"].found
