// Makes elements. What it is given is text, never markup.

export const find = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A number for people: the digits that matter. */
export function short(value) {
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (value >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (value >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toPrecision(value < 0.1 ? 1 : 2);
}

export function duration(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 1) return `${short(seconds * 1000)} ms`;
  if (seconds < 100) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  return `${Math.round(seconds / 60)} min`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${short(count)} ${units[unit]}`;
}
