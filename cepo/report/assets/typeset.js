// Shows Markdown and LaTeX as they read: fenced code, `code`, **bold**, headings and formulas. All texts become text nodes.
const SIGNS = {
  times: "×", cdot: "·", div: "÷", pm: "±", mp: "∓", le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈",
  equiv: "≡", sim: "∼", cong: "≅", to: "→", rightarrow: "→", Rightarrow: "⇒", implies: "⇒", iff: "⇔", infty: "∞",
  angle: "∠", triangle: "△", parallel: "∥", perp: "⊥", circ: "°", degree: "°", in: "∈", cup: "∪", cap: "∩", subset: "⊂",
  sum: "∑", prod: "∏", int: "∫", therefore: "∴", because: "∵", ldots: "…", dots: "…", cdots: "⋯", quad: "  ", qquad: "    ",
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ε", theta: "θ", lambda: "λ", mu: "μ", pi: "π", rho: "ρ",
  sigma: "σ", tau: "τ", phi: "φ", omega: "ω", Delta: "Δ", Sigma: "Σ", Omega: "Ω", sin: "sin", cos: "cos", tan: "tan",
  log: "log", ln: "ln", left: "", right: "", displaystyle: "", ",": " ", ";": " ", ":": " ", "!": "", " ": " ",
  "{": "{", "}": "}", "%": "%", $: "$", "\\": "\n",
};
const UPRIGHT = ["text", "mathrm", "textbf", "mathbf", "operatorname", "mathbb", "textit"];
const DEEPEST = 20;

// Reads one formula from left to right; what it does not know stays as it is written.
const formula = (source) => {
  let at = 0;
  const command = () => /^\\([A-Za-z]+|.|$)/s.exec(source.slice(at));
  const group = (depth) => {
    while (source[at] === " ") at += 1;
    if (source[at] !== "{") return [atom(depth)];
    at += 1;
    const parts = many(depth, "}");
    at += 1;
    return parts;
  };
  const atom = (depth) => {
    const character = source[at];
    if (character === undefined) return "";
    if (depth > DEEPEST) {
      const rest = source.slice(at);
      at = source.length;
      return rest;
    }
    if (character === "{") return make("span", {}, ...group(depth + 1));
    if (character === "^" || character === "_") {
      at += 1;
      return make(character === "^" ? "sup" : "sub", {}, ...group(depth + 1));
    }
    if (character !== "\\") {
      at += 1;
      return character;
    }
    const [written, name] = command();
    at += written.length;
    if (["frac", "dfrac", "tfrac"].includes(name)) {
      const above = make("span", {}, ...group(depth + 1));
      return make("span", { className: "frac" }, above, make("span", {}, ...group(depth + 1)));
    }
    if (name === "sqrt" && source[at] !== "[") return make("span", {}, "√", make("span", { className: "root" }, ...group(depth + 1)));
    if (name === "boxed" || name === "fbox") return make("span", { className: "boxed" }, ...group(depth + 1));
    if (UPRIGHT.includes(name)) return make("span", { className: "upright" }, ...group(depth + 1));
    return Object.hasOwn(SIGNS, name) ? SIGNS[name] : written;
  };
  const many = (depth, end) => {
    const parts = [];
    while (at < source.length && source[at] !== end) parts.push(atom(depth));
    return parts;
  };
  return make("span", { className: "formula" }, ...many(0));
};

// A dollar sign opens a formula only before a sign that is no space, and closes it only after one and before no digit.
const PARTS = [
  [/```[^\n`]*\n([\s\S]*?)(?:```|(?![\s\S]))/, (match) => make("pre", { textContent: match[1].trimEnd() })],
  [/\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\]/, (match) => formula((match[1] ?? match[2]).trim())],
  [/\\\(([\s\S]+?)\\\)|\$(?=\S)([^$\n]*?[^$\s])\$(?!\d)/, (match) => formula(match[1] ?? match[2])],
  [/\\boxed\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}/, (match) => formula(match[0])],
  [/`([^`\n]+)`/, (match) => make("code", { textContent: match[1] })],
  [/\*\*(?=\S)([^*\n]*?\S)\*\*/, (match) => make("b", {}, ...typeset(match[1]))],
  [/^#{1,6} +(.+)$/m, (match) => make("b", {}, ...typeset(match[1]))],
];
const ANY_PART = new RegExp(PARTS.map(([pattern]) => `(?:${pattern.source})`).join("|"), "gm");

const typeset = (text) => {
  const parts = [];
  let last = 0;
  for (const { 0: written, index } of text.matchAll(ANY_PART)) {
    parts.push(text.slice(last, index));
    for (const [pattern, show] of PARTS) {
      const match = pattern.exec(written);
      if (match?.index === 0 && match[0].length === written.length) {
        parts.push(show(match));
        break;
      }
    }
    last = index + written.length;
  }
  return [...parts, text.slice(last)];
};

// Sets the texts of some columns of a row, once; the text as it was written is kept for the search and the switch.
const typesetRow = (row, columns, asWritten) => {
  for (const column of columns) {
    const place = row.cells[column].querySelector("div");
    place.written ??= place.textContent;
    if (place.isWritten === asWritten) continue;
    place.isWritten = asWritten;
    place.replaceChildren(...(asWritten ? [place.written] : typeset(place.written)));
  }
};
