"use strict";
// The one chart of these pages, drawn as SVG when its part is open, and the one table, which sorts and searches.
const byId = (id) => document.getElementById(id);
const inSvg = (tag, attributes = {}, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
};
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const short = (value, digits = 3) => value === null || value === undefined ? "–" : Number.isNaN(value) ? "not a number" : value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4)
  ? Number(value).toExponential(1).replace("e+", "e").replace(".0e", "e") : String(Number(value.toPrecision(digits)));
const ticksOf = (low, high, count) => {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  return Array.from({ length: Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1 }, (_, place) => (Math.ceil(low / step - 1e-9) + place) * step);
};
let addChart;  // draws data into a figure with a plot and a legend
(() => {
  let charts = [];
  const smooth = (values) => {
    const weight = Number(byId("smoothing")?.value ?? 0);
    let mean = null, total = 0;
    return values.map((value) => {
      if (value === null || weight === 0) return value;
      mean = weight * (mean ?? 0) + (1 - weight) * value;
      return mean / (1 - weight ** (total += 1));
    });
  };
  const draw = (chart) => {
    const { data, plot } = chart, { clientWidth: width, clientHeight: height } = plot, left = 46, bottom = 34;
    const log = data.x === "step" && byId("log")?.checked;
    const shown = data.series.filter((one) => !one.hidden);
    const drawn = new Map(data.series.map((one) => [one, smooth(one.values)]));
    const usable = (value) => value !== null && Number.isFinite(value) && (!log || value > 0);
    const all = shown.flatMap((one) => [drawn.get(one), one.low, one.high].flat()).filter(usable).map((value) => log ? Math.log10(value) : value);
    let low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!all.length || data.x === "token") [low, high] = [0, 1];
    if (high - low < 1e-9 * Math.max(Math.abs(high), 1e-300)) [low, high] = [Math.min(low, 0), Math.max(high, 0) || 1];
    const steps = data.series.flatMap((one) => one.steps);
    const first = steps.reduce((a, b) => Math.min(a, b), Infinity), last = steps.reduce((a, b) => Math.max(a, b), -Infinity);
    const x = (step) => left + (step - first) / (last - first || 1) * (width - left - 12);
    const y = (value) => 8 + (high - (log ? Math.log10(Math.max(value, 1e-300)) : value)) / (high - low) * (height - 8 - bottom);
    const svg = inSvg("svg", { width, height, tabindex: 0, role: "img", "aria-label": `${data.title}, ${data.unit}; ${shown.map((one) => `${one.label}: ${short(one.values[0])} to ${short(one.values.at(-1))}`).join(", ")}` });
    for (const tick of ticksOf(low, high, height / 50)) {
      const at = 8 + (high - tick) / (high - low) * (height - 8 - bottom);
      svg.append(inSvg("line", { x1: left, x2: width - 12, y1: at, y2: at, class: "grid" }), inSvg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, log ? short(10 ** tick) : short(tick, 6)));
    }
    for (const tick of ticksOf(first, last, Math.max(2, width / 90)).filter((tick) => data.x !== "step" || Number.isInteger(tick)))
      svg.append(inSvg("text", { x: x(tick), y: height - bottom + 16, "text-anchor": "middle" }, short(tick, 6)));
    svg.append(inSvg("text", { x: width - 12, y: height - 4, "text-anchor": "end" }, data.x));
    for (const one of shown) {
      const values = drawn.get(one), style = `--c:${one.c}`;
      const points = one.steps.map((step, place) => [x(step), values[place]]).filter(([, value]) => usable(value));
      if (one.low.length) {
        const edge = (values) => one.steps.map((step, place) => usable(values[place]) ? `${x(step)},${y(values[place])}` : "").filter(Boolean);
        svg.append(inSvg("polygon", { points: [...edge(one.low), ...edge(one.high).reverse()].join(" "), style, class: "band" }));
      }
      svg.append(inSvg("polyline", { points: points.map(([at, value]) => `${at},${y(value)}`).join(" "), style, "stroke-dasharray": one.dash.join(" ") || "none" }));
      if (points.length <= 60) for (const [at, value] of points) svg.append(inSvg("circle", { cx: at, cy: y(value), r: 2.5, style }));
    }
    for (const step of data.marks ?? []) svg.append(inSvg("line", { x1: x(step), x2: x(step), y1: 8, y2: height - bottom, class: "mark" }));
    chart.cross = inSvg("line", { y1: 8, y2: height - bottom, class: "cross", visibility: "hidden" });
    svg.append(chart.cross);
    chart.steps = [...new Set(steps)].sort((a, b) => a - b);
    chart.x = x;
    const nearest = (event) => chart.steps.reduce((best, step) => Math.abs(x(step) - event.offsetX) < Math.abs(x(best) - event.offsetX) ? step : best);
    const choose = (step) => data.x === "step" && step !== null && dispatchEvent(new CustomEvent("step-chosen", { detail: step }));
    svg.addEventListener("pointermove", (event) => point(nearest(event), chart));
    svg.addEventListener("pointerleave", () => point(null, chart));
    svg.addEventListener("click", (event) => choose(nearest(event)));
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) point(chart.steps[Math.min(Math.max(chart.steps.indexOf(chart.at) + by, 0), chart.steps.length - 1)], chart);
      if (event.key === "Enter") choose(chart.at);
      if (by || event.key === "Enter") event.stopPropagation();
    });
    plot.replaceChildren(svg);
  };
  const legend = (chart) => {
    const entries = chart.data.series.map((one) => {
      one.reading = make("output");
      const button = make("button", { title: one.help }, inSvg("svg", { width: 14, height: 12, "aria-hidden": true }), make("span", { textContent: one.label }), one.reading);
      button.firstChild.append(inSvg("rect", { y: 4, width: 14, height: 4, style: `--c:${one.c}` }));
      button.ariaPressed = "true";
      button.onclick = () => { one.hidden = !one.hidden; button.ariaPressed = String(!one.hidden); draw(chart); };
      return button;
    });
    const save = make("a", { textContent: "CSV", title: "save the values of this chart", download: `${chart.data.title}.csv`, href: "#" });
    save.addEventListener("click", () => {
      const rows = chart.data.series.filter((one) => !one.hidden).flatMap((one) => one.steps.map((step, place) => `${JSON.stringify(one.label)},${step},${one.values[place]}`));
      save.href = URL.createObjectURL(new Blob([["series,step,value", ...rows].join("\n") + "\n"], { type: "text/csv" }));
    });
    chart.place.querySelector(".legend").replaceChildren(...entries, save);
  };
  // One step is read in all charts over steps at once, in their legends, so that nothing lies over a curve.
  const point = (step, from) => {
    for (const chart of from.data.x === "step" ? charts.filter((one) => one.data.x === "step") : [from]) {
      chart.at = step;
      const at = step === null ? NaN : chart.x(step);
      chart.cross.setAttribute("visibility", Number.isFinite(at) && chart.steps.includes(step) ? "visible" : "hidden");
      if (Number.isFinite(at)) { chart.cross.setAttribute("x1", at); chart.cross.setAttribute("x2", at); }
      for (const one of chart.data.series) {
        const place = one.steps.indexOf(step);
        one.reading.value = place < 0 ? "" : short(one.values[place]);
      }
    }
  };
  addChart = (place, data) => {
    const plot = place.querySelector(".plot"), chart = { place, data, plot, at: null };
    charts = [...charts.filter((one) => one.place.isConnected), chart];
    legend(chart);
    new ResizeObserver(() => plot.clientWidth && draw(chart)).observe(plot);
  };
  const redraw = () => charts.filter((one) => one.plot.clientWidth).forEach(draw);
  document.querySelectorAll("figure.chart").forEach((figure) => addChart(figure, JSON.parse(figure.querySelector("script").textContent)));
  for (const id of ["smoothing", "log"]) byId(id)?.addEventListener("input", redraw);
  byId("find-chart")?.addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase();
    for (const figure of document.querySelectorAll(".charts figure")) {
      const isFound = figure.textContent.toLowerCase().includes(words);
      figure.hidden = !isFound;
      if (words && isFound) figure.closest("details").open = true;
    }
  });

  const valueOf = (row, column) => "value" in row.cells[column].dataset ? Number(row.cells[column].dataset.value) : row.cells[column].textContent;
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const place of document.querySelectorAll(".table")) {
    const body = place.querySelector("tbody"), controls = place.querySelector(".controls");
    let most = 50;
    const filter = () => {
      if (!controls) return;
      const words = controls.querySelector("input").value.toLowerCase(), chosen = [...controls.querySelectorAll("select")].filter((one) => one.value);
      const found = [...body.rows].filter((row) => row.textContent.toLowerCase().includes(words) && chosen.every((one) => row.cells[one.dataset.column].textContent === one.value));
      for (const row of body.rows) row.hidden = true;
      for (const row of found.slice(0, most)) row.hidden = false;
      controls.querySelector("output").value = `${Math.min(most, found.length)} of ${found.length} rows`;
      controls.querySelector("button").hidden = found.length <= most;
    };
    controls?.addEventListener("input", () => { most = 50; filter(); });
    controls?.querySelector("button").addEventListener("click", () => { most += 50; filter(); });
    for (const button of place.querySelectorAll("th button")) button.addEventListener("click", () => {
      const head = button.parentElement, sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of head.parentElement.cells) other.ariaSort = null;
      head.ariaSort = sign > 0 ? "ascending" : "descending";
      body.append(...[...body.rows].sort((a, b) => sign * compare(valueOf(a, head.cellIndex), valueOf(b, head.cellIndex))));
      filter();
    });
    filter();
  }
  byId("theme").onchange = ({ target }) => { document.documentElement.style.colorScheme = target.value; };
  byId("copy").onclick = async ({ target }) => {
    target.textContent = await navigator.clipboard.writeText(location.href).then(() => "Copied", () => location.href);
    setTimeout(() => { target.textContent = "Copy link"; }, 3000);
  };
  const open = () => {
    const target = byId(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", open);
  open();
})();
