"""Implements `cepo look`: shows the rollouts of any trainer, and why it does not learn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.commands.following import follow
from cepo.terminal.lines import print_plain
from cepo.terminal.progress import log_to_stderr, phase

if TYPE_CHECKING:
    from cepo.report.html_page import Section


def look_at(place: Path, *, image: Path | None, follows: bool, **options: Any) -> None:
    """Reads rollouts, prints the diagnosis and writes the page; the parameters are the arguments of `cepo look`."""
    from cepo.look.reading import sizes_of_files
    from cepo.look.still_picture import require_svg

    require_svg(image)
    log_to_stderr()
    if follows:
        follow(lambda: sizes_of_files(place), lambda: _written(place, image=image, **options))
    else:
        print_plain("\n".join(_written(place, image=image, **options)))


def _written(place: Path, *, out: Path, most: int, model: str | None, responses: int, image: Path | None) -> list[str]:
    """Writes the page and returns what is printed."""
    from cepo.look.look_page import write_look_page
    from cepo.look.reading import read_rollouts_of
    from cepo.look.still_picture import write_still_picture
    from cepo.look.text_pair import clearest_pair_section
    from cepo.report.diagnosis import Observed, diagnosed
    from cepo.report.findings import findings_lines
    from cepo.report.responses import groups_of

    with phase("reading the rollouts and looking for faults", is_brief=True):
        seen = read_rollouts_of(place, most=most)
        observed = Observed(groups_of(seen.responses), seen.metrics)
        findings = diagnosed(observed)
    lines = [seen.line(), *seen.notes, *findings_lines(findings)]
    contrast: list[Section] = []
    if model is not None:
        from cepo.look.contrast import contrast_sections, gauge, scored_groups

        scored = scored_groups(observed.groups, model, responses=responses)
        contrast = contrast_sections(scored)
        lines.append(gauge(scored))
    with phase("writing the page", is_brief=True):
        page = write_look_page(out, seen, observed, findings, contrast=contrast)
    lines.append(f"page: {page}")
    if image is not None:
        pair = contrast[0] if contrast else clearest_pair_section(observed.mixed)
        lines.append(f"image: {write_still_picture(image, pair)}")
    return lines
