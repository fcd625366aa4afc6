// The credit view: one rollout at a time, under several methods. Whatever models or data wrote is set as text.
(() => {
  const data = JSON.parse(byId("credit-data").textContent);
  const view = byId("credit");
  const filterIds = ["step", "verdict", "words"];
  const blocks = {}; // by step, as far as they have been opened
  let entries = []; // of all rollouts: step, place, searched text, whether it is right
  let listed = []; // those that pass the filters
  let current = null; // the block and the place of the rollout that is shown, and its entry
  let chosenMethods = null;

  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  };
  const openBlock = (step) => {
    blocks[step] ??= unpack(data.blocks[step]);
    return blocks[step];
  };

  // Characters that would not show, or would turn the text around them, are shown by their number.
  const nameOf = (character) => {
    if (character === "\n") return "↵\n";
    if (character === "\t") return "⇥";
    const number = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    return `⟨U+${number}⟩`;
  };
  const visible = (text) => text.replace(/\p{Cc}|\p{Cf}|\p{Cs}|\p{Zl}|\p{Zp}/gu, nameOf) || "∅";
  const plain = (text) => text.replace(/[^\P{C}\n\t]/gu, nameOf);
  const titleOf = (rollout, place) => `token ${place + 1}: '${visible(rollout.tokens[place]).slice(0, 60)}'`;

  const facts = (pairs) => {
    const list = make("dl");
    for (const [name, value] of pairs) {
      const description = make("dd", { textContent: value });
      if (value.length > 200) description.tabIndex = 0; // it scrolls
      list.append(make("dt", { textContent: name }), description);
    }
    return list;
  };

  // Of each kind of value the neutral one, the distance of full colour, and what the two ends say. Of a response that is
  // punished a larger weight means more blame, so its colours change sides.
  const SCALES = {
    weight: { neutral: 1, full: 0.5, less: "credited less", more: "credited more" },
    blame: { neutral: 1, full: -0.5, less: "blamed more", more: "blamed less" },
    advantage: { neutral: 0, full: 2, less: "blamed", more: "credited" },
    delta: { neutral: 0, full: 2, less: "speaks for a wrong answer", more: "speaks for a right answer" },
  };
  const kindOf = (columns) => {
    const kind = byId("colour").value;
    return kind in columns ? kind : "advantage";
  };
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const scaleOf = (columns) => {
    const kind = kindOf(columns);
    const isBlamed = kind === "weight" && columns.advantage && sum(columns.advantage) < 0;
    return SCALES[isBlamed ? "blame" : kind];
  };
  const paint = (token, shift) => {
    if (shift === null) {
      token.className = "unmeasured";
      return;
    }
    token.className = shift > 0 ? "more" : "less";
    token.style.setProperty("--share", `${Math.round(100 * Math.min(Math.abs(shift), 1))}%`);
  };
  const tokensOf = (rollout, columns, label) => {
    const values = columns[kindOf(columns)];
    const { neutral, full } = scaleOf(columns);
    const tokens = make("div", { className: "tokens", tabIndex: 0, ariaLabel: label, role: "group" });
    rollout.tokens.forEach((text, place) => {
      const token = make("span", { textContent: visible(text) });
      const value = values?.[place] ?? null;
      paint(token, value === null ? null : (value - neutral) / full);
      tokens.append(token);
    });
    return Object.assign(tokens, { columns, rollout });
  };
  const legendOf = (columns) => {
    const { neutral, full, less, more } = scaleOf(columns);
    const low = `${less} (${kindOf(columns)} ${short(neutral - full)}) `;
    const high = ` ${more} (${short(neutral + full)})`;
    return make("p", { className: "scale" }, low, make("i", { className: "both" }), high);
  };

  // The probability that the response is right, from 0 to 1, with a mark at each of the largest jumps.
  const curveOf = (values) => {
    const steps = values.map((_, place) => place + 1);
    const jumpAt = (step) => Math.abs(values[step - 1] - values[step - 2]);
    const jumps = steps.slice(1).filter((step) => jumpAt(step) > 0.1);
    jumps.sort((one, other) => jumpAt(other) - jumpAt(one));
    const figure = make("figure", { className: "chart" }, make("div", { className: "plot" }));
    const help = "as the evidence up to each token tells";
    const series = { label: "P(right)", help, steps, values, low: [], high: [], colour: "#5B3FA0", dash: [] };
    const title = "Probability that the response is right";
    addChart(figure, { title, unit: "from 0 to 1", x: "token", marks: jumps.slice(0, 3), series: [series] });
    return figure;
  };

  // How many tokens of a response have a clipped weight, for methods that clip weights.
  const clippedOf = (rates) => {
    const lower = (100 * rates.lower).toFixed(1);
    const upper = (100 * rates.upper).toFixed(1);
    const text = `weight clipped: ${lower} % of tokens at the lower bound, ${upper} % at the upper`;
    return make("p", { className: "note clipped", textContent: text });
  };

  // The tokens with the largest evidence, down to a twentieth of the largest.
  const decisivePlaces = (delta) => {
    const places = [...delta.keys()].sort((one, other) => Math.abs(delta[other]) - Math.abs(delta[one])).slice(0, 5);
    const largest = Math.abs(delta[places[0]]);
    return places.filter((place) => Math.abs(delta[place]) > Math.max(0.001, largest / 20));
  };
  const panelOf = (block, rollout, number) => {
    const method = block.methods[number];
    const columns = rollout.columns[number + 1];
    const tokens = tokensOf(rollout, columns, `tokens under ${method}; arrow keys move between them`);
    const decisive = make("div", { className: "decisive" });
    if (columns.delta) {
      decisive.append("largest evidence: ");
      for (const place of decisivePlaces(columns.delta)) {
        const text = `${visible(rollout.tokens[place]).slice(0, 30)} ${short(columns.delta[place])}`;
        const title = titleOf(rollout, place);
        decisive.append(make("button", { textContent: text, title, onclick: () => readToken(tokens, place) }));
      }
    }
    const missing = "This method has no value curve: it weighs no evidence token by token.";
    const value = columns.value ? curveOf(columns.value) : make("p", { className: "note", textContent: missing });
    const rates = rollout.clip_rates[number];
    const foot = make("div", {}, legendOf(columns), ...(rates ? [clippedOf(rates)] : []), decisive);
    return make("section", { className: "panel" }, make("h3", { textContent: method }), value, tokens, foot);
  };

  // All numbers of one token, beside the panels.
  const NAMES = {
    weight: "weight after clipping",
    raw_weight: "weight before clipping",
    clipping: "clipped at the upper bound (1) or the lower (-1)",
  };
  const readToken = (tokens, place) => {
    const token = tokens.children[place];
    if (!token) return;
    const { rollout, columns } = tokens;
    for (const other of document.querySelectorAll("#credit .tokens .current")) other.classList.remove("current");
    token.classList.add("current");
    const logProbs = rollout.columns[0];
    const rows = [];
    for (const [name, values] of Object.entries(logProbs)) rows.push([`log P ${name}`, short(values[place])]);
    for (const [name, values] of Object.entries(columns)) {
      if (!(name in logProbs)) rows.push([NAMES[name] ?? name, short(values[place])]);
    }
    if (columns.delta) rows.push(["cumulative evidence", short(sum(columns.delta.slice(0, place + 1)))]);
    const method = make("p", { className: "note", textContent: tokens.ariaLabel.split(";")[0] });
    byId("tip").replaceChildren(make("b", { textContent: titleOf(rollout, place) }), method, facts(rows));
    tokens.place = place;
  };

  const verdictOf = (rollout) => {
    const verdict = rollout.accuracy >= 0.5 ? "right" : "wrong";
    const cut = rollout.finished ? "" : ", cut by the length limit";
    return `${verdict}, reward ${short(rollout.reward)}${cut}`;
  };
  const imagesOf = (group) => group.images.map((source, number) => {
    const image = make("img", { src: source, alt: `image ${number + 1} of the problem` });
    const button = make("button", { className: "image", title: "enlarge or shrink" }, image);
    button.onclick = () => button.classList.toggle("large");
    return button;
  });
  const factsOf = (block, place) => {
    const rollout = block.rollouts[place];
    const group = block.groups[rollout.group];
    const unscored = rollout.is_scored ? "" : "; the student's log-probs are the rollout engine's";
    const pairs = [
      ["step", `${block.step}, rollout ${place}`],
      ["problem", plain(`${group.prompt_id}: ${group.problem}`)],
      ["answer", plain(group.ground_truth)],
    ];
    for (const [name, text] of Object.entries(rollout.references)) {
      pairs.push([`${name} reference`, text === null ? "none: the student's own context" : plain(text)]);
    }
    pairs.push(["response", `${verdictOf(rollout)}; ${group.right} of ${group.size} recorded are right`]);
    pairs.push(["tokens", `${rollout.tokens.length}${unscored}`]);
    return facts(pairs);
  };
  const boxOf = (method) => {
    const box = make("input", { type: "checkbox", checked: chosenMethods.has(method) });
    box.onchange = () => {
      if (box.checked) chosenMethods.add(method);
      else chosenMethods.delete(method);
      draw();
    };
    return make("label", {}, box, ` ${method}`);
  };
  const membersOf = (block, group) => {
    const members = [...block.rollouts.entries()].filter(([, rollout]) => rollout.group === group);
    members.sort(([, one], [, other]) => other.reward - one.reward);
    return members.map(([place, rollout]) => {
      const link = make("a", { href: `#step=${block.step}&rollout=${place}`, textContent: `rollout ${place}` });
      const tokens = tokensOf(rollout, rollout.columns[1], `tokens of rollout ${place} under ${block.methods[0]}`);
      return make("section", { className: "panel" }, make("h3", {}, link, `: ${verdictOf(rollout)}`), tokens);
    });
  };
  const draw = () => {
    const { block, place } = current;
    const rollout = block.rollouts[place];
    chosenMethods ??= new Set(block.shown);
    byId("methods").replaceChildren("Methods: ", ...block.methods.map(boxOf));
    byId("rollout").replaceChildren(...imagesOf(block.groups[rollout.group]), factsOf(block, place));
    const panels = [];
    block.methods.forEach((method, number) => {
      if (chosenMethods.has(method)) panels.push(panelOf(block, rollout, number));
    });
    byId("panels").replaceChildren(...panels);
    byId("group").lastElementChild.replaceChildren(...membersOf(block, rollout.group));
  };

  // The address names the rollout once the reader has chosen one; such an address opens the view.
  const linkOf = () => `#step=${current.block.step}&rollout=${current.place}`;
  const reveal = () => {
    view.open = true;
    view.scrollIntoView();
  };
  const showNothing = (reason) => {
    current = null;
    delete document.body.dataset.rollout;
    byId("rollout").replaceChildren(reason);
    byId("panels").replaceChildren();
    byId("group").lastElementChild.replaceChildren();
    byId("position").value = `0 of ${listed.length}`;
  };
  const show = async (entry, { isChosen = true } = {}) => {
    if (!entry) {
      showNothing("No rollout passes the filter.");
      return;
    }
    const [step, place] = entry;
    current = { block: await openBlock(step), place, entry };
    document.body.dataset.rollout = linkOf();
    if (isChosen) history.replaceState(null, "", linkOf());
    byId("position").value = `${listed.indexOf(entry) + 1} of ${listed.length}`;
    draw();
  };
  const filter = () => {
    const [chosenStep, verdict, words] = filterIds.map((id) => byId(id).value.toLowerCase());
    listed = entries.filter(([step, , text, isRight]) => {
      if (chosenStep && String(step) !== chosenStep) return false;
      if (verdict && isRight !== (verdict === "right")) return false;
      return text.includes(words);
    });
  };
  const move = (by) => {
    const place = listed.indexOf(current?.entry) + by;
    if (place >= 0 && place < listed.length) show(listed[place]);
  };
  const entryOf = (step, place) => entries.find((entry) => entry[0] === step && entry[1] === place);
  const follow = () => {
    const address = new URLSearchParams(location.hash.slice(1));
    if (!address.has("step")) {
      if (!current) show(entryOf(...data.start), { isChosen: false });
      return;
    }
    reveal();
    const entry = entryOf(Number(address.get("step")), Number(address.get("rollout")));
    if (!entry) {
      const name = `rollout ${address.get("rollout")} of step ${address.get("step")}`;
      showNothing(`The address names ${name}, which this page does not have. Next leads to the first that it has.`);
      return;
    }
    if (!listed.includes(entry)) {
      for (const id of filterIds) byId(id).value = "";
      filter();
    }
    show(entry);
  };

  for (const id of filterIds) {
    byId(id).addEventListener("input", () => {
      filter();
      show(listed.includes(current?.entry) ? current.entry : listed[0]);
    });
  }
  byId("colour").addEventListener("input", () => {
    if (current) draw();
  });
  byId("previous").onclick = () => move(-1);
  byId("next").onclick = () => move(1);
  for (const kind of ["pointerover", "click"]) {
    view.addEventListener(kind, ({ target }) => {
      const tokens = target.parentElement;
      if (tokens?.className === "tokens") readToken(tokens, [...tokens.children].indexOf(target));
    });
  }
  // A step that was chosen on a chart leads to the nearest one whose rollouts are recorded.
  addEventListener("step-chosen", ({ detail: step }) => {
    const distance = (entry) => Math.abs(entry[0] - step);
    const nearest = entries.reduce((best, entry) => (distance(entry) < distance(best) ? entry : best));
    location.hash = `#step=${nearest[0]}&rollout=${nearest[1]}`;
    reveal();
  });
  addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, select, textarea");
    if (!view.open || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const byArrow = signOf(event, "ArrowLeft", "ArrowRight");
    const tokens = event.target.closest("#credit .tokens");
    if (tokens && byArrow !== 0) {
      readToken(tokens, (tokens.place ?? -1) + byArrow);
      event.preventDefault();
      return;
    }
    const by = byArrow || signOf(event, "k", "j");
    if (by !== 0) move(by);
  });
  addEventListener("hashchange", follow);
  unpack(data.index).then((index) => {
    entries = index;
    filter();
    follow();
  });
})();
