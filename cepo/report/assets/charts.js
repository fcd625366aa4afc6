// Charts: curves over steps or another quantity, each labelled at its end, drawn when its part of the page is open.
const chartClocks = JSON.parse(byId("clocks").textContent);
const CHART_TOP = 10;
const CHART_BOTTOM = 26;
const UNIT_HEIGHT = 16; // of a long unit below the axis
const LABEL_HEIGHT = 24;
const LEAST_LABEL_GAP = 17;
const MOST_POINTS_WITH_DOTS = 60;
let charts = [];

const pen = document.createElement("canvas").getContext("2d");
const widthOf = (text, plot, weight = 400) => {
  pen.font = `${weight} 12.5px ${getComputedStyle(plot).fontFamily}`;
  return pen.measureText(text).width;
};

const ticksOf = (low, high, count) => {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find((size) => size * power >= rough * 0.999);
  const step = power * factor;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  const ticks = [];
  for (let number = first; number <= last; number += 1) ticks.push(number * step);
  return ticks;
};

const formatted = (chart, value, digits = 3) => {
  if (!chart.data.isShare || value === null || !Number.isFinite(value)) return short(value, digits);
  return `${short(100 * value, digits)} %`;
};

// Means that weigh earlier values less and less, without bias towards the first.
const smoothed = (values) => {
  const weight = Number(byId("smoothing")?.value ?? 0);
  if (weight === 0) return values;
  let mean = 0;
  let count = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    count += 1;
    return mean / (1 - weight ** count);
  });
};

const rangeOf = (values) => {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
};

// A label has the name of its curve and one of its values, of which the longest needs most room.
const labelWidth = (chart, series) => {
  const texts = series.values.map((value) => formatted(chart, value));
  const longest = texts.reduce((best, text) => (text.length > best.length ? text : best), "");
  return widthOf(`${series.label} `, chart.plot) + widthOf(longest, chart.plot, 650) + 6;
};

// What a chart is drawn with: its scales, and the texts at its axes.
const scalesOf = (chart) => {
  const { data, plot } = chart;
  const isOverSteps = data.x === "step";
  const isLog = isOverSteps && byId("log")?.checked;
  const clock = isOverSteps ? chartClocks[byId("clock")?.value] : undefined;
  const timeOf = (step) => (clock ? clock[step] ?? NaN : step);
  const isUsable = (value) => value !== null && Number.isFinite(value) && (!isLog || value > 0);
  const levelOf = (value) => (isLog ? Math.log10(Math.max(value, 1e-300)) : value);

  const levels = [];
  const times = [];
  for (const series of data.series) {
    for (const step of series.steps) times.push(timeOf(step));
    if (series.isHidden) continue;
    series.drawn = smoothed(series.values);
    for (const values of [series.drawn, series.low, series.high]) levels.push(...values.filter(isUsable).map(levelOf));
  }
  let [low, high] = rangeOf(levels);
  if (levels.length === 0 || data.x === "token") [low, high] = [0, 1];
  if (high - low < 1e-9 * Math.max(Math.abs(high), 1e-300)) {
    low = Math.min(low, 0);
    high = Math.max(high, 0) || 1;
  }
  const [first, last] = rangeOf(times.filter(Number.isFinite));

  const unitOfTime = clock ? byId("clock").value : data.x;
  const isUnitBelow = unitOfTime.length > 8;
  const height = plot.clientHeight - CHART_TOP - CHART_BOTTOM - (isUnitBelow ? UNIT_HEIGHT : 0);
  const ticks = ticksOf(low, high, height / 42).map((level) => {
    const value = isLog ? 10 ** level : level;
    return { level, text: formatted(chart, value, isLog ? 3 : 6) };
  });
  const left = 8 + Math.max(0, ...ticks.map((tick) => widthOf(tick.text, plot)));
  const right = Math.min(14 + Math.max(0, ...data.series.map((series) => labelWidth(chart, series))), 0.45 * plot.clientWidth);
  const width = plot.clientWidth - left - right;
  return {
    ticks, left, right, width, height, first, last, timeOf, isUsable,
    unitOfTime, isUnitBelow,
    hasWholeTicks: isOverSteps && !clock,
    xOfTime: (time) => left + ((time - first) / (last - first || 1)) * width,
    x: (step) => left + ((timeOf(step) - first) / (last - first || 1)) * width,
    yOfLevel: (level) => CHART_TOP + ((high - level) / (high - low)) * height,
    y: (value) => CHART_TOP + ((high - levelOf(value)) / (high - low)) * height,
  };
};

const drawAxes = (svg, scales) => {
  const end = scales.left + scales.width;
  const bottom = CHART_TOP + scales.height;
  for (const tick of scales.ticks) {
    const y = scales.yOfLevel(tick.level);
    svg.append(makeSvg("line", { x1: scales.left, x2: end, y1: y, y2: y, class: "grid" }));
    svg.append(makeSvg("text", { x: scales.left - 6, y: y + 4, "text-anchor": "end", class: "level" }, tick.text));
  }
  for (const time of ticksOf(scales.first, scales.last, Math.max(2, scales.width / 80))) {
    if (scales.hasWholeTicks && !Number.isInteger(time)) continue;
    const x = scales.xOfTime(time);
    svg.append(makeSvg("text", { x, y: bottom + 18, "text-anchor": "middle", class: "time" }, short(time, 6)));
  }
  const unitPlace = scales.isUnitBelow
    ? { x: end, y: bottom + 18 + UNIT_HEIGHT, "text-anchor": "end" }
    : { x: end + 14, y: bottom + 18 };
  svg.append(makeSvg("text", { ...unitPlace, class: "unit" }, scales.unitOfTime));
};

const drawSeries = (svg, series, scales) => {
  const style = `--c:${series.colour}`;
  const points = [];
  series.steps.forEach((step, place) => {
    const value = series.drawn[place];
    const x = scales.x(step);
    if (scales.isUsable(value) && Number.isFinite(x)) points.push([x, scales.y(value)]);
  });
  const edgeOf = (values) => {
    const edge = [];
    series.steps.forEach((step, place) => {
      if (scales.isUsable(values[place])) edge.push(`${scales.x(step)},${scales.y(values[place])}`);
    });
    return edge;
  };
  if (series.low.length > 0) {
    const outline = [...edgeOf(series.low), ...edgeOf(series.high).reverse()];
    svg.append(makeSvg("polygon", { points: outline.join(" "), style, class: "band" }));
  }
  const line = points.map(([x, y]) => `${x},${y}`).join(" ");
  svg.append(makeSvg("polyline", { points: line, style, "stroke-dasharray": series.dash.join(" ") || "none" }));
  if (points.length <= MOST_POINTS_WITH_DOTS) {
    for (const [x, y] of points) svg.append(makeSvg("circle", { cx: x, cy: y, r: 2.5, style }));
  }
  series.end = points.length > 0 ? points.at(-1)[1] : CHART_TOP + scales.height;
};

// Labels stand at the ends of their curves, moved apart where they would overlap.
const placeLabels = (chart, scales) => {
  const bottom = CHART_TOP + scales.height;
  const gap = Math.min(LABEL_HEIGHT, (scales.height + LABEL_HEIGHT) / chart.data.series.length);
  const inOrder = [...chart.data.series].sort((one, other) => (one.isHidden ? bottom : one.end) - (other.isHidden ? bottom : other.end));
  const places = [];
  for (const series of inOrder) {
    const wanted = series.isHidden ? bottom : series.end;
    places.push(Math.max(wanted, places.length > 0 ? places.at(-1) + gap : 0));
  }
  for (let number = places.length - 1; number >= 0; number -= 1) {
    const limit = number === places.length - 1 ? bottom : places[number + 1] - gap;
    places[number] = Math.min(places[number], limit);
  }
  inOrder.forEach((series, number) => {
    const { style } = series.button;
    style.top = `${places[number] - LABEL_HEIGHT / 2}px`;
    style.left = `${scales.left + scales.width + 8}px`;
    style.maxWidth = `${scales.right - 8}px`;
  });
};

const stepsOf = (chart) => {
  const steps = new Set();
  for (const series of chart.data.series) series.steps.forEach((step) => steps.add(step));
  return [...steps].sort((one, other) => one - other);
};

const descriptionOf = (chart) => {
  const ranges = [];
  for (const series of chart.data.series) {
    if (series.isHidden) continue;
    ranges.push(`${series.label}: ${formatted(chart, series.values[0])} to ${formatted(chart, series.values.at(-1))}`);
  }
  return `${chart.data.title}, ${chart.data.unit}; ${ranges.join(", ")}`;
};

const drawChart = (chart) => {
  const { data, plot } = chart;
  const scales = scalesOf(chart);
  const size = { width: plot.clientWidth, height: plot.clientHeight };
  const svg = makeSvg("svg", { ...size, tabindex: 0, role: "img", "aria-label": descriptionOf(chart) });
  drawAxes(svg, scales);
  for (const series of data.series) if (!series.isHidden) drawSeries(svg, series, scales);
  const bottom = CHART_TOP + scales.height;
  for (const step of data.marks ?? []) {
    svg.append(makeSvg("line", { x1: scales.x(step), x2: scales.x(step), y1: CHART_TOP, y2: bottom, class: "mark" }));
  }
  chart.cross = makeSvg("line", { y1: CHART_TOP, y2: bottom, class: "cross", visibility: "hidden" });
  svg.append(chart.cross);
  chart.x = scales.x;
  listen(chart, svg);
  placeLabels(chart, scales);
  chart.svg?.remove();
  chart.svg = svg;
  plot.prepend(svg);
};

const listen = (chart, svg) => {
  const nearest = (event) => {
    const distance = (step) => Math.abs(chart.x(step) - event.offsetX);
    return chart.steps.reduce((best, step) => (distance(step) < distance(best) ? step : best));
  };
  const choose = (step) => {
    if (chart.data.x === "step" && step !== null) dispatchEvent(new CustomEvent("step-chosen", { detail: step }));
  };
  svg.addEventListener("pointermove", (event) => readStep(nearest(event), chart));
  svg.addEventListener("pointerleave", () => readStep(null, chart));
  svg.addEventListener("click", (event) => choose(nearest(event)));
  svg.addEventListener("keydown", (event) => {
    const by = signOf(event, "ArrowLeft", "ArrowRight");
    if (by !== 0) {
      const place = chart.steps.indexOf(chart.step) + by;
      readStep(chart.steps[Math.min(Math.max(place, 0), chart.steps.length - 1)], chart);
    }
    if (event.key === "Enter") choose(chart.step);
    if (by !== 0 || event.key === "Enter") event.stopPropagation();
  });
};

// One step is read in all charts over steps at once, in their labels; without one, the labels have the last values.
const readStep = (step, source) => {
  const readCharts = source.data.x === "step" ? charts.filter((chart) => chart.data.x === "step") : [source];
  for (const chart of readCharts) {
    chart.step = step;
    const x = step === null || !chart.x ? NaN : chart.x(step);
    const isMeasured = Number.isFinite(x) && chart.steps.includes(step);
    chart.cross?.setAttribute("visibility", isMeasured ? "visible" : "hidden");
    if (isMeasured) {
      chart.cross.setAttribute("x1", x);
      chart.cross.setAttribute("x2", x);
    }
    for (const series of chart.data.series) {
      const place = step === null ? series.values.length - 1 : series.steps.indexOf(step);
      const end = series.steps.at(-1);
      const hasEnded = step === null && end < chart.steps.at(-1) && chart.data.x === "step";
      series.reading.value = place < 0 ? "" : formatted(chart, series.values[place]) + (hasEnded ? ` at ${end}` : "");
    }
  }
};

const labelOf = (chart, series) => {
  series.reading = make("output");
  const name = make("span", { textContent: series.label });
  const button = make("button", { className: "curve-label", title: series.help || series.label, ariaPressed: "true" }, name, " ", series.reading);
  button.style.setProperty("--c", series.colour);
  button.onclick = () => {
    series.isHidden = !series.isHidden;
    button.ariaPressed = String(!series.isHidden);
    drawChart(chart);
  };
  series.button = button;
  return button;
};

const csvOf = (chart) => {
  const lines = ["series,step,value"];
  for (const series of chart.data.series) {
    if (series.isHidden) continue;
    series.steps.forEach((step, place) => lines.push(`${JSON.stringify(series.label)},${step},${series.values[place]}`));
  }
  return `${lines.join("\n")}\n`;
};

// Draws data into a figure that has a caption and a plot.
const addChart = (figure, data) => {
  const plot = figure.querySelector(".plot");
  const chart = { figure, data, plot, step: null };
  chart.steps = stepsOf(chart);
  const heightOfLabels = LEAST_LABEL_GAP * data.series.length + CHART_TOP + CHART_BOTTOM;
  if (heightOfLabels > 210) plot.style.height = `${heightOfLabels}px`;
  for (const series of data.series) plot.append(labelOf(chart, series));
  const save = make("a", { className: "csv", textContent: "CSV", title: "save the values of this chart", download: `${data.title}.csv`, href: "#" });
  save.addEventListener("click", () => {
    save.href = URL.createObjectURL(new Blob([csvOf(chart)], { type: "text/csv" }));
  });
  figure.querySelector("figcaption")?.append(save);
  charts = [...charts.filter((other) => other.figure.isConnected), chart];
  readStep(null, chart);
  new ResizeObserver(() => {
    if (plot.clientWidth > 0) drawChart(chart);
  }).observe(plot);
};

for (const figure of document.querySelectorAll("figure.chart")) {
  addChart(figure, JSON.parse(figure.querySelector("script").textContent));
}
for (const id of ["smoothing", "clock", "log"]) {
  byId(id)?.addEventListener("input", () => {
    for (const chart of charts) if (chart.plot.clientWidth > 0) drawChart(chart);
  });
}
byId("find-chart")?.addEventListener("input", ({ target }) => {
  const words = target.value.toLowerCase();
  for (const figure of document.querySelectorAll(".charts figure")) {
    const isMatch = figure.textContent.toLowerCase().includes(words);
    figure.hidden = !isMatch;
    if (words && isMatch) figure.closest("details").open = true;
  }
});
