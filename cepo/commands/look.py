"""Implements `cepo look`: shows the rollouts of any trainer, and why it does not learn."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.errors import DataError
from cepo.terminal.lines import print_plain
from cepo.terminal.progress import log_to_stderr, phase

if TYPE_CHECKING:
    from cepo.report.html_page import Section


_SECONDS_BETWEEN_LOOKS = 2.0
_LEAST_REST = 10
"""Times as long as the last page took: what follows a run takes a tenth of a core at most."""


def look_at(place: Path, *, image: Path | None, follow: bool, **options: Any) -> None:
    """Reads rollouts, prints the diagnosis and writes the page; the parameters are the arguments of `cepo look`."""
    from cepo.look.still_picture import require_svg

    require_svg(image)
    log_to_stderr()
    if follow:
        _follow(place, image=image, **options)
    else:
        print_plain("\n".join(_written(place, image=image, **options)))


def _follow(place: Path, **options: Any) -> None:
    """Writes the page whenever a file has grown or come, until Ctrl-C; says once what it waits for."""
    from cepo.look.reading import sizes_of_files

    sizes_of_page: dict[Path, int] = {}
    waited_for = ""
    try:
        while True:
            start = time.monotonic()
            try:
                sizes = sizes_of_files(place)
                if sizes != sizes_of_page:
                    print_plain("\n".join(_written(place, **options)))
                    sys.stdout.flush()
                    sizes_of_page = sizes
                waited_for = ""
            except DataError as error:  # nothing is there yet, or a trainer is writing the file
                if str(error) != waited_for:
                    waited_for = str(error)
                    print_plain(f"waiting: {waited_for}", to_stderr=True)
            time.sleep(max(_SECONDS_BETWEEN_LOOKS, _LEAST_REST * (time.monotonic() - start)))
    except KeyboardInterrupt:
        return


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
