"use strict";
// Charts are drawn when they come into view, in the screen's colours. Headings sort tables.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const draw = async (place) => {
    const text = place.nextElementSibling.textContent;
    place.replaceChildren();
    const item = JSON.parse(text.replaceAll("#010203", colour("--ink")).replaceAll("#040506", colour("--line")));
    await Bokeh.embed.embed_item(item, place);
    place.dataset.drawn = "true";
  };
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "300px" });
  const charts = document.querySelectorAll(".chart");
  charts.forEach((chart) => seen.observe(chart));
  dark.addEventListener("change", () => charts.forEach((chart) => chart.dataset.drawn && draw(chart)));

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const button of document.querySelectorAll(".sortable th button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement, body = head.closest("table").tBodies[0];
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of head.parentElement.cells) other.ariaSort = null;
      head.ariaSort = sign > 0 ? "ascending" : "descending";
      const rows = [...body.rows];
      rows.sort((a, b) => sign * compare(valueOf(a, head.cellIndex), valueOf(b, head.cellIndex)));
      body.append(...rows);
    });
  }
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  });
})();
