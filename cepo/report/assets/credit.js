"use strict";
// The credit view: one rollout at a time, under several methods. Whatever models or data wrote is set as text.
(() => {
  const data = JSON.parse(byId("credit-data").textContent), opened = {}, filters = ["step", "verdict", "words"];
  let all = [], listed = [], current = null, chosen = null;

  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  };
  const open = (step) => opened[step] ??= unpack(data.blocks[step]);

  const facts = (pairs) => make("dl", {}, ...pairs.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", value.length > 200 ? { textContent: value, tabIndex: 0 } : { textContent: value })]));
  // Characters that would not show, or would turn the text around them, are shown by their number.
  const visible = (text) => text.replace(/\p{Cc}|\p{Cf}|\p{Cs}|\p{Zl}|\p{Zp}/gu, (character) =>
    character === "\n" ? "↵\n" : character === "\t" ? "⇥" : `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`) || "∅";
  const plain = (text) => text.replace(/[^\P{C}\n\t]/gu, (character) => visible(character));
  const named = (rollout, place) => `token ${place + 1}: '${visible(rollout.tokens[place]).slice(0, 60)}'`;
  // Of each kind of value the neutral one, the distance of full colour, and what the two ends say: of a response that
  // is punished, a larger weight means more blame, so its colours change sides.
  const scales = {
    weight: (blamed) => blamed ? [1, -0.5, "blamed more", "blamed less"] : [1, 0.5, "credited less", "credited more"],
    advantage: () => [0, 2, "blamed", "credited"],
    delta: () => [0, 2, "speaks for a wrong answer", "speaks for a right answer"],
  };
  const scaleOf = (columns, kind) => scales[kind](columns.advantage ? columns.advantage.reduce((sum, value) => sum + value, 0) < 0 : false);
  const colourOf = (shift) => shift === null ? "var(--line)"
    : `color-mix(in srgb, var(--${shift > 0 ? "more" : "less"}) ${Math.round(100 * Math.min(Math.abs(shift), 1))}%, var(--tokens))`;
  const kindOf = (columns) => byId("colour").value in columns ? byId("colour").value : "advantage";
  const tokensOf = (rollout, columns, label) => {
    const kind = kindOf(columns), [neutral, full] = scaleOf(columns, kind);
    const tokens = make("div", { className: "tokens", tabIndex: 0, ariaLabel: label });
    tokens.setAttribute("role", "group");
    tokens.append(...rollout.tokens.map((text, place) => {
      const token = make("span", { textContent: visible(text) });
      const value = columns[kind]?.[place] ?? null;
      token.style.background = colourOf(value === null ? null : (value - neutral) / full);
      return token;
    }));
    return Object.assign(tokens, { columns, rollout });
  };
  const legendOf = (columns) => {
    const kind = kindOf(columns), [neutral, full, less, more] = scaleOf(columns, kind);
    return make("div", { className: "scale" }, `${less} (${kind} ${short(neutral - full)})`, make("i"), `${more} (${short(neutral + full)})`);
  };

  // The probability that the response is right, from 0 to 1, with a mark at each of the largest jumps.
  const curve = (values) => {
    const jump = (place) => Math.abs(values[place] - values[place - 1]), steps = values.map((_, place) => place + 1);
    const marks = steps.slice(1).filter((step) => jump(step - 1) > 0.1).sort((a, b) => jump(b - 1) - jump(a - 1)).slice(0, 3);
    const figure = make("figure", { className: "chart" }, make("div", { className: "plot" }), make("div", { className: "legend" }));
    const series = [{ label: "P(right)", help: "as the evidence up to each token tells", steps, values, low: [], high: [], c: "#0072B2", dash: [] }];
    addChart(figure, { title: "Probability that the response is right", unit: "from 0 to 1", x: "token", marks, series });
    return figure;
  };

  const panel = (block, rollout, number) => {
    const columns = rollout.columns[number + 1];
    const tokens = tokensOf(rollout, columns, `tokens under ${block.methods[number]}; arrow keys move between them`);
    const order = columns.delta ? [...columns.delta.keys()].sort((a, b) => Math.abs(columns.delta[b]) - Math.abs(columns.delta[a])).slice(0, 5).filter((place) => Math.abs(columns.delta[place]) > 0.001) : [];
    const decisive = make("div", { className: "decisive" }, order.length ? "largest evidence: " : "", ...order.map((place) =>
      make("button", { textContent: `${named(rollout, place)} ${short(columns.delta[place])}`, onclick: () => point(tokens, place) })));
    const value = columns.value ? curve(columns.value) : make("p", { className: "note", textContent: "This method has no value curve: it weighs no evidence token by token." });
    return make("section", { className: "panel" }, make("h3", { textContent: block.methods[number] }), tokens, value, make("div", {}, legendOf(columns), decisive));
  };

  const point = (tokens, place) => {
    const token = tokens.children[place], { rollout, columns } = tokens;
    if (!token) return;
    document.querySelectorAll(".tokens .current").forEach((other) => other.classList.remove("current"));
    token.classList.add("current");
    const names = { ...rollout.columns[0], ...columns };
    const called = (name) => name === "weight" ? "weight after clipping" : name === "raw_weight" ? "weight before clipping" : name in rollout.columns[0] ? `log P ${name}` : name;
    const rows = Object.entries(names).map(([name, values]) => [called(name), short(values[place])]);
    if (columns.delta) rows.push(["cumulative evidence", short(columns.delta.slice(0, place + 1).reduce((sum, value) => sum + value))]);
    byId("tip").replaceChildren(make("b", { textContent: named(rollout, place) }), make("p", { className: "note", textContent: tokens.ariaLabel.split(";")[0] }), facts(rows));
    tokens.place = place;
  };
  const wordsOf = (rollout) => `${rollout.accuracy >= 0.5 ? "right" : "wrong"}, reward ${short(rollout.reward)}${rollout.finished ? "" : ", cut by the length limit"}`;
  const imagesOf = (group) => group.images.map((source, number) => make("button", { className: "image", title: "enlarge or shrink", onclick: (event) => event.currentTarget.classList.toggle("large") },
    make("img", { src: source, alt: `image ${number + 1} of the problem` })));

  // The first screen: one rollout under the run's own method.
  const drawFirst = async () => {
    const [step, place] = data.start, block = await open(step), rollout = block.rollouts[place], group = block.groups[rollout.group];
    byId("first-rollout")?.replaceChildren(
      make("h2", { textContent: `A response of step ${step}: ${wordsOf(rollout)}` }), make("div", { className: "problem" }, ...imagesOf(group).slice(0, 1), make("p", { textContent: `${plain(group.problem.replace("<image>", ""))} Answer: ${plain(group.ground_truth)}` })),
      tokensOf(rollout, rollout.columns[1], `tokens under ${block.methods[0]}`), legendOf(rollout.columns[1]),
      make("p", {}, make("a", { href: `#step=${step}&rollout=${place}`, textContent: "Its credit under all methods", onclick: () => reveal() })));
  };

  const draw = () => {
    const { block, place } = current, rollout = block.rollouts[place], group = block.groups[rollout.group];
    chosen ??= new Set(block.shown);
    const boxes = block.methods.map((name) => {
      const box = make("input", { type: "checkbox", checked: chosen.has(name), onchange: () => { chosen[box.checked ? "add" : "delete"](name); draw(); } });
      return make("label", {}, box, ` ${name}`);
    });
    byId("methods").replaceChildren("Methods: ", ...boxes);
    const references = Object.entries(rollout.references).map(([view, text]) => [`${view} reference`, text === null ? "none: the student's own context" : plain(text)]);
    byId("rollout").replaceChildren(
      ...imagesOf(group),
      facts([["step", `${block.step}, rollout ${place}`], ["problem", plain(`${group.prompt_id}: ${group.problem}`)], ["answer", plain(group.ground_truth)], ...references,
        ["response", `${wordsOf(rollout)}; ${group.right} of ${group.size} recorded are right`], ["tokens", `${rollout.tokens.length}${rollout.is_scored ? "" : "; the student's log-probs are the rollout engine's"}`]]));
    byId("panels").replaceChildren(...block.methods.flatMap((name, number) => chosen.has(name) ? [panel(block, rollout, number)] : []));
    const members = [...block.rollouts.entries()].filter(([, other]) => other.group === rollout.group).sort(([, a], [, b]) => b.reward - a.reward);
    byId("group").lastElementChild.replaceChildren(...members.map(([number, other]) => make("section", { className: "panel" },
      make("h3", {}, make("a", { href: `#step=${block.step}&rollout=${number}`, textContent: `rollout ${number}` }), `: ${wordsOf(other)}`), tokensOf(other, other.columns[1], `tokens of rollout ${number} under ${block.methods[0]}`))));
  };

  // While the view is open, the address is that of its rollout; such an address opens it.
  const view = byId("credit"), address = () => view.open && current && history.replaceState(null, "", `#step=${current.block.step}&rollout=${current.place}`);
  const reveal = () => { view.open = true; view.scrollIntoView(); };
  const showNothing = (reason) => {
    current = null;
    byId("rollout").replaceChildren(reason);
    for (const place of [byId("panels"), byId("group").lastElementChild]) place.replaceChildren();
    byId("position").value = `0 of ${listed.length}`;
  };
  const show = async (entry) => {
    if (!entry) return showNothing("No rollout passes the filter.");
    const [step, place] = entry;
    current = { block: await open(step), place, entry };
    byId("position").value = `${listed.indexOf(entry) + 1} of ${listed.length}`;
    address();
    draw();
  };
  const filter = () => {
    const [step, verdict, words] = filters.map((id) => byId(id).value.toLowerCase());
    listed = all.filter(([of, , text, right]) => (!step || String(of) === step) && (!verdict || right === (verdict === "right")) && text.includes(words));
  };
  const move = (by) => {
    const place = listed.indexOf(current?.entry) + by;
    if (place >= 0 && place < listed.length) show(listed[place]);
  };
  const follow = () => {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (asked.has("step")) reveal();
    const find = (step, place) => all.find((entry) => entry[0] === step && entry[1] === place);
    const entry = find(Number(asked.get("step")), Number(asked.get("rollout")));
    if (entry && !listed.includes(entry)) { for (const id of filters) byId(id).value = ""; filter(); }
    if (entry) show(entry);
    else if (asked.has("step")) showNothing(`The address names rollout ${asked.get("rollout")} of step ${asked.get("step")}, which this page does not have. Next leads to the first that it has.`);
    else if (!current) show(find(...data.start));
  };

  for (const id of filters) byId(id).addEventListener("input", () => { filter(); show(listed.includes(current?.entry) ? current.entry : listed[0]); });
  byId("colour").addEventListener("input", () => { current && draw(); drawFirst(); });
  view.addEventListener("toggle", address);
  byId("previous").onclick = () => move(-1);
  byId("next").onclick = () => move(1);
  for (const kind of ["pointerover", "click"]) view.addEventListener(kind, (event) => {
    const tokens = event.target.parentElement;
    if (tokens?.className === "tokens") point(tokens, [...tokens.children].indexOf(event.target));
  });
  addEventListener("step-chosen", ({ detail }) => {  // on a chart: the nearest step whose rollouts are recorded
    const nearest = all.reduce((best, entry) => Math.abs(entry[0] - detail) < Math.abs(best[0] - detail) ? entry : best);
    location.hash = `#step=${nearest[0]}&rollout=${nearest[1]}`;
    reveal();
  });
  addEventListener("keydown", (event) => {
    if (!view.open || event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    if (event.target.className === "tokens" && event.key.startsWith("Arrow")) { point(event.target, (event.target.place ?? -1) + by); event.preventDefault(); }
    else move(by);
  });
  addEventListener("hashchange", follow);
  unpack(data.index).then((index) => {
    all = index;
    filter();
    follow();
    drawFirst();
  });
})();
