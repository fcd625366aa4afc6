"use strict";
// The credit view: one rollout at a time, under several methods. Whatever models or data wrote is set as text.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("credit-data").textContent);
  const waiting = {}, opened = {};
  let all = [], problems = [], listed = [], current = null, chosen = null;

  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  };
  window.creditBlock = (step, text) => waiting[step](text);
  const blockOf = (step) => step in data.blocks ? data.blocks[step] : new Promise((resolve, reject) => {
    waiting[step] = resolve;
    const script = document.createElement("script");
    script.src = data.files[step];
    script.onerror = () => reject(new Error(`${script.src} is missing beside the page`));
    document.head.append(script);
  });
  const open = async (step) => {
    const buffer = await unpack(await blockOf(step));
    const length = new DataView(buffer).getUint32(0, true);
    const block = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let place = 4 + length;
    for (const rollout of block.rollouts) {
      const count = rollout.tokens.length;
      for (const part of rollout.columns) for (const name in part) {
        if (part[name] !== null) { part[name] = new Float32Array(count).fill(part[name]); continue; }
        part[name] = new Float32Array(buffer, place, count);
        place += 4 * count;
      }
    }
    return block;
  };

  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const facts = (pairs) => make("dl", {}, ...pairs.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  // Characters that would not show, or would turn the text around them, are shown by their number.
  const visible = (text) => text.replace(/\p{Cc}|\p{Cf}|\p{Cs}|\p{Zl}|\p{Zp}/gu, (character) =>
    character === "\n" ? "↵\n" : character === "\t" ? "⇥" : `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`) || "∅";
  const plain = (text) => text.replace(/[^\P{C}\n\t]/gu, (character) => visible(character));
  const shown = (value) => Number.isNaN(value) ? "not a number" : Math.abs(value) >= 1e5 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  const neutral = { weight: 1, advantage: 0, delta: 0 };
  const ends = [[214, 96, 77], [67, 147, 195]];  // the ends of a scale that red-green blindness tells apart
  const colourOf = (shift) => {
    if (Number.isNaN(shift)) return "#d9d9d9";
    const end = ends[shift > 0 ? 1 : 0], amount = Math.min(Math.abs(shift), 1);
    return `rgb(${end.map((value) => Math.round(255 + (value - 255) * amount)).join(" ")})`;
  };
  const sums = (values) => { let sum = 0; return Array.from(values, (value) => sum += value); };

  const curve = (values) => {
    const name = "http://www.w3.org/2000/svg", points = Array.from(values, (value, place) => `${place},${1 - value}`);
    const svg = document.createElementNS(name, "svg"), line = document.createElementNS(name, "polyline"), half = document.createElementNS(name, "line");
    svg.setAttribute("viewBox", `0 0 ${Math.max(values.length - 1, 1)} 1`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `probability that the response is right: from ${shown(values[0])} to ${shown(values[values.length - 1])}`);
    line.setAttribute("points", points.join(" "));
    for (const [key, value] of Object.entries({ x1: 0, x2: values.length, y1: 0.5, y2: 0.5 })) half.setAttribute(key, value);
    svg.append(half, line);
    return svg;
  };

  const panel = (block, rollout, number) => {
    const columns = rollout.columns[number + 1], wanted = byId("colour").value;
    const kind = wanted in columns ? wanted : "advantage", values = columns[kind], scale = block.scales[kind];
    const tokens = make("div", { className: "tokens", tabIndex: 0 });
    tokens.setAttribute("aria-label", `tokens under ${block.methods[number]}; arrow keys move between them`);
    tokens.append(...rollout.tokens.map((text, place) => {
      const token = make("span", { textContent: visible(text) });
      token.style.background = values ? colourOf((values[place] - neutral[kind]) / scale) : "";
      return token;
    }));
    tokens.columns = columns;
    const parts = [make("h3", { textContent: block.methods[number] }), tokens];
    if (columns.value) parts.push(curve(columns.value), make("p", { className: "note", textContent: `value curve: ${shown(columns.value[0])} before the first token, ${shown(columns.value[columns.value.length - 1])} at the last` }));
    parts.push(make("div", { className: "scale" }, `${kind} ${shown(neutral[kind] - scale)}`, make("i"), `${shown(neutral[kind] + scale)}`));
    if (columns.delta) {
      const order = [...columns.delta.keys()].sort((a, b) => Math.abs(columns.delta[b]) - Math.abs(columns.delta[a])).slice(0, 8);
      parts.push(make("div", { className: "decisive" }, "most decisive: ", ...order.filter((place) => columns.delta[place] !== 0).map((place) =>
        make("button", { textContent: `${visible(rollout.tokens[place]).trim()} ${shown(columns.delta[place])}`, onclick: () => point(tokens, place) }))));
    }
    return make("section", { className: "panel" }, ...parts);
  };

  const point = (tokens, place) => {
    const token = tokens.children[place];
    if (!token) return;
    tokens.querySelector(".current")?.classList.remove("current");
    token.classList.add("current");
    token.scrollIntoView({ block: "nearest" });
    const rollout = current.block.rollouts[current.place], columns = tokens.columns;
    const names = { ...rollout.columns[0], ...columns };
    const called = (name) => name === "weight" ? "weight after clipping" : name === "raw_weight" ? "weight before clipping" : name in rollout.columns[0] ? `log P ${name}` : name;
    const rows = Object.entries(names).map(([name, values]) => [called(name), shown(values[place])]);
    if (columns.delta) rows.push(["cumulative evidence", shown(sums(columns.delta)[place])]);
    const tip = byId("tip"), box = token.getBoundingClientRect();
    tip.replaceChildren(make("b", { textContent: `${place + 1}: ${visible(rollout.tokens[place]).slice(0, 60)}` }), facts(rows));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - width - 4))}px`;
    tip.style.top = `${box.bottom + height + 8 < innerHeight ? box.bottom + 6 : Math.max(4, box.top - height - 6)}px`;
    tokens.place = place;
  };

  const draw = () => {
    byId("tip").hidden = true;
    const { block, place } = current, rollout = block.rollouts[place], group = block.groups[rollout.group];
    chosen ??= new Set(block.shown);
    const boxes = block.methods.map((name) => {
      const box = make("input", { type: "checkbox", checked: chosen.has(name), onchange: () => { chosen[box.checked ? "add" : "delete"](name); draw(); } });
      return make("label", {}, box, ` ${name}`);
    });
    byId("methods").replaceChildren("Methods: ", ...boxes);
    const verdict = `${rollout.accuracy >= 0.5 ? "right" : "wrong"}, reward ${shown(rollout.reward)}${rollout.finished ? "" : ", cut by the length limit"}`;
    const references = Object.entries(rollout.references).map(([view, text]) => [`${view} reference`, text === null ? "none: the student's own context" : plain(text)]);
    byId("rollout").replaceChildren(
      ...group.images.map((source, number) => make("img", { src: source, alt: `image ${number + 1} of the problem` })),
      facts([["step", `${block.step}, rollout ${place}`], ["problem", plain(`${group.prompt_id}: ${group.problem}`)], ["answer", plain(group.ground_truth)], ...references,
        ["response", `${verdict}; ${group.right} of ${group.size} recorded are right`], ["tokens", `${rollout.tokens.length}${rollout.is_scored ? "" : "; the student's log-probs are the rollout engine's"}`]]));
    byId("panels").replaceChildren(...block.methods.flatMap((name, number) => chosen.has(name) ? [panel(block, rollout, number)] : []));
  };

  const show = async (entry) => {
    if (!entry) { byId("rollout").replaceChildren("No rollout passes the filter."); byId("panels").replaceChildren(); byId("position").value = "0 of 0"; return; }
    const [step, place] = entry;
    opened[step] ??= open(step);
    current = { block: await opened[step], place, entry };
    byId("position").value = `${listed.indexOf(entry) + 1} of ${listed.length}`;
    history.replaceState(null, "", `#step=${step}&rollout=${place}`);
    draw();
  };
  const filter = () => {
    const [step, verdict, problem, words] = ["step", "verdict", "problem", "words"].map((id) => byId(id).value.toLowerCase());
    listed = all.filter(([of, , number, right, , response]) => (!step || String(of) === step) && (!verdict || right === (verdict === "right"))
      && problems[number].toLowerCase().includes(problem) && response.toLowerCase().includes(words));
  };
  const move = (by) => {
    const place = listed.indexOf(current?.entry) + by;
    if (place >= 0 && place < listed.length) show(listed[place]);
  };
  const follow = () => {
    const asked = new URLSearchParams(location.hash.slice(1));
    const find = (step, place) => all.find((entry) => entry[0] === step && entry[1] === place);
    const entry = find(Number(asked.get("step")), Number(asked.get("rollout")));
    if (entry && !listed.includes(entry)) { for (const id of ["step", "verdict", "problem", "words"]) byId(id).value = ""; filter(); }
    if (entry || !current) show(entry ?? find(data.start.step, data.start.rollout));
  };

  for (const id of ["step", "verdict", "problem", "words"]) byId(id).addEventListener("input", () => { filter(); show(listed.includes(current?.entry) ? current.entry : listed[0]); });
  byId("colour").addEventListener("input", draw);
  byId("previous").onclick = () => move(-1);
  byId("next").onclick = () => move(1);
  for (const kind of ["pointerover", "click"]) byId("panels").addEventListener(kind, (event) => {
    const tokens = event.target.parentElement;
    if (tokens?.className === "tokens") point(tokens, [...tokens.children].indexOf(event.target));
  });
  byId("panels").addEventListener("pointerleave", () => byId("tip").hidden = true);
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") byId("tip").hidden = true;
    if (!by) return;
    if (event.target.className === "tokens" && event.key.startsWith("Arrow")) { point(event.target, (event.target.place ?? -1) + by); event.preventDefault(); }
    else move(by);
  });
  addEventListener("hashchange", follow);
  unpack(data.index).then((buffer) => {
    ({ problems, rollouts: all } = JSON.parse(new TextDecoder().decode(buffer)));
    filter();
    follow();
  });
})();
