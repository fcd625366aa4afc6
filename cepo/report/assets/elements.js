// Helpers that all scripts of the page share. Texts of models and data become text nodes, never markup.
const byId = (id) => document.getElementById(id);

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

const makeSvg = (tag, attributes = {}, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
};

// A number with so many digits, without an exponent where it reads well.
const short = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "not a number";
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e5 || size < 1e-4)) {
    return Number(value).toExponential(1).replace("e+", "e").replace(".0e", "e");
  }
  return String(Number(value.toPrecision(digits)));
};

const signOf = (event, back, forth) => {
  if (event.key === forth) return 1;
  return event.key === back ? -1 : 0;
};
