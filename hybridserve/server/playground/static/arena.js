// Draws the arena: a cell a slab or, where there are more than fit, a cell for several; and what its bytes are for.

import { find, make, setText } from "./dom.js";

const GAP = 1;
const SIZES = [18, 14, 12, 10, 9, 8, 7, 6, 5];
const MAX_HEIGHT = 120;
const KINDS = ["free", "kv", "state", "null"]; // by number; in a cell, from the bottom to what is left: free

const SHARES = ["kv_live", "state_live", "kv_cached", "checkpoints", "fragmented", "free"];

const canvas = find("arena");
let shown = null; // the kind of each slab, by number

/** The largest cells of which enough fit, and how many slabs each then stands for. */
function layOut(numSlabs, width) {
  for (const size of SIZES) {
    const columns = Math.floor((width + GAP) / (size + GAP));
    if (Math.ceil(numSlabs / columns) * (size + GAP) <= MAX_HEIGHT) return { size, columns, perCell: 1 };
  }
  const size = 6;
  const columns = Math.floor((width + GAP) / (size + GAP));
  const rows = Math.floor(MAX_HEIGHT / (size + GAP));
  return { size, columns, perCell: Math.ceil(numSlabs / (columns * rows)) };
}

/** How many slabs of each kind every cell has. */
function fill(slabs, perCell) {
  const cells = Array.from({ length: Math.ceil(slabs.length / perCell) }, () => ({ kv: 0, state: 0, null: 0, free: 0 }));
  slabs.forEach((kind, index) => cells[Math.floor(index / perCell)][KINDS[kind]]++);
  return cells;
}

function paint() {
  const width = canvas.clientWidth;
  if (!shown || !width) return;
  const { size, columns, perCell } = layOut(shown.length, width);
  const cells = fill(shown, perCell);
  const height = Math.ceil(cells.length / columns) * (size + GAP) - GAP;
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pitch = (width + GAP) / columns; // the columns share what is left of the width
  const style = getComputedStyle(canvas);
  const colour = (kind) => style.getPropertyValue(`--${kind}`);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  cells.forEach((cell, index) => {
    const column = index % columns;
    const x = Math.round(column * pitch);
    const wide = Math.round((column + 1) * pitch) - GAP - x;
    const y = Math.floor(index / columns) * (size + GAP);
    pen.fillStyle = colour("free");
    pen.fillRect(x, y, wide, size);
    let bottom = y + size;
    for (const kind of KINDS.slice(1)) {
      if (!cell[kind]) continue;
      const part = perCell === 1 ? size : Math.max(2, (size * cell[kind]) / perCell);
      const top = Math.max(y, bottom - part);
      pen.fillStyle = colour(kind);
      pen.fillRect(x, top, wide, bottom - top);
      bottom = top;
    }
  });
  return perCell;
}

export function show(arena, bytes) {
  shown = new Uint8Array(arena.num_slabs); // what is not told is free
  shown.set(Uint8Array.from(atob(arena.slabs), (each) => each.charCodeAt(0)));
  const [totals] = fill(shown, shown.length);
  for (const [kind, total] of Object.entries(totals)) setText(find(`num-${kind}`), String(total));
  const perCell = paint() ?? 1;
  const each = `${perCell === 1 ? "a cell, a slab" : `a cell, ${perCell} slabs`} of ${bytes(arena.slab_bytes)}`;
  setText(find("scale"), arena.slab_bytes ? each : "");
  canvas.setAttribute(
    "aria-label",
    `Map of the arena: ${totals.kv} slabs of KV, ${totals.state} of state, ${totals.free} free, ${totals.null} null`,
  );
}

/** One bar: of all bytes, those that sequences hold, those that are kept for later prompts, and the others. */
export function showShares(sizes, bytes) {
  const bar = find("shares");
  if (!bar.children.length) {
    bar.append(...SHARES.map((kind) => make("i")));
    SHARES.forEach((kind, index) => (bar.children[index].dataset.share = kind));
  }
  SHARES.forEach((kind, index) => {
    const part = bar.children[index];
    part.hidden = !sizes[kind];
    part.style.flexGrow = String(sizes[kind]);
    setText(find(`bytes-${kind}`), bytes(sizes[kind]));
  });
  const told = SHARES.map((kind) => `${kind.replace("_", " ")} ${bytes(sizes[kind])}`);
  bar.setAttribute("aria-label", `What the arena's memory is used for: ${told.join(", ")}`);
}

export function start() {
  new ResizeObserver(paint).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}
