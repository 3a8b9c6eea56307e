"use strict";
// Elements, units, and pictures over time. Numbers are bytes and seconds.

const COLOURS = [0, 1, 2, 3, 4, 5, 6].map((n) => `var(--c${n})`);
const colour = (n) => COLOURS[Math.min(n, COLOURS.length - 1)];

// Make an element. Text is set as text, never as HTML.
function make(name, attributes = {}, ...children) {
  const inSvg = ["svg", "g", "path", "rect", "line", "text", "title"].includes(name);
  const made = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return made;
}

function scaled(value, steps, unit) {
  for (const [size, name] of steps) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(2)} ${name}`;
  }
  return `${value.toFixed(0)} ${unit}`;
}

const bytes = (n) => scaled(n, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]], "B");
const rate = (n) => scaled(n, [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]], "B/s");
const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.1 ? 2 : 1)} %`;

function seconds(s) {
  if (Math.abs(s) >= 120) return `${Math.floor(s / 60)} min ${(s % 60).toFixed(0)} s`;
  if (Math.abs(s) >= 1) return `${s.toFixed(2)} s`;
  if (Math.abs(s) >= 1e-3) return `${(s * 1e3).toFixed(1)} ms`;
  return `${(s * 1e6).toFixed(1)} µs`;
}

// Return some four round numbers from 0 up to `top`.
function ticks(top, base) {
  if (!(top > 0)) return [0];
  let unit = base === 2 ? 2 ** (10 * Math.floor(Math.log2(top) / 10)) : 10 ** Math.floor(Math.log10(top));
  const rough = top / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = unit * power * ([1, 2, 2.5, 5, 10].find((n) => n * power >= rough) || 10);
  return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, n) => n * step);
}

// A table: `columns` are names, or [name, "number" or "long"]; cells are text, or [text, exact value].
function table(caption, columns, rows) {
  const kinds = columns.map((each) => (Array.isArray(each) ? each[1] : ""));
  const cell = (value, n) => {
    const [text, exact] = Array.isArray(value) ? value : [value, null];
    return make("td", { class: kinds[n] || null, "data-value": exact }, text instanceof Node ? text : String(text));
  };
  const head = columns.map((each, n) =>
    make("th", { scope: "col", class: kinds[n] === "number" ? "number" : null }, Array.isArray(each) ? each[0] : each));
  return make("div", { class: "table" }, make("table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, head)),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell))))));
}

function legend(entries) {
  return make("ul", { class: "legend" }, entries.map(([name, fill]) =>
    make("li", {}, make("i", fill ? { style: `background:${fill}` } : { class: "dashed" }), name)));
}

const more = (title, ...inside) => make("details", {}, make("summary", {}, title), inside);

// Values over time as a table of at most 24 rows; `together` joins the values of neighbouring parts.
function tableOverTime(caption, series, partS, show, together) {
  const count = series[0].values.length, group = Math.max(1, Math.ceil(count / 24));
  const rows = [];
  for (let begin = 0; begin < count; begin += group) {
    const end = Math.min(count, begin + group);
    rows.push([`${seconds(begin * partS)} to ${seconds(end * partS)}`,
      ...series.map((one) => show(together(one.values.slice(begin, end))))]);
  }
  return table(caption, ["time", ...series.map((one) => [one.name, "number"])], rows);
}

const highestOf = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const meanOf = (values) => values.reduce((a, b) => a + b, 0) / Math.max(1, values.length);

const LEFT = 82, RIGHT = 14, TOP = 12, BOTTOM = 24;

// Draw the axes; return the picture, and functions from values to places in it.
function axes({ width, height, lengthS, top, show, base, label, left = LEFT }) {
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": label });
  const x = (s) => left + (width - left - RIGHT) * (lengthS > 0 ? s / lengthS : 0);
  const y = (value) => height - BOTTOM - (height - BOTTOM - TOP) * (top > 0 ? value / top : 0);
  const axis = make("g", { class: "axis", "aria-hidden": "true" });
  for (const value of show ? ticks(top, base) : []) {
    axis.append(make("line", { x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    axis.append(make("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, value === 0 ? "0" : show(value).replace(/\.00 /, " ")));
  }
  for (const s of lengthS > 0 ? ticks(lengthS, 10) : []) {
    axis.append(make("line", { x1: x(s), x2: x(s), y1: height - BOTTOM, y2: height - BOTTOM + 4 }));
    axis.append(make("text", { x: x(s), y: height - 6, "text-anchor": "middle" }, s === 0 ? "0" : shortSeconds(s, lengthS)));
  }
  svg.append(axis);
  return { svg, x, y, left };
}

const shortSeconds = (s, lengthS) =>
  lengthS >= 1 ? `${Number(s.toPrecision(6))} s` : lengthS >= 1e-3 ? `${Number((s * 1e3).toPrecision(6))} ms` : `${(s * 1e6).toFixed(0)} µs`;

// A picture of series over equal parts of time, stacked or as lines, which mouse and arrow keys read out.
function chart({ label, series, partS, lengthS, top, show, base, stacked, height = 170, budget, width }) {
  const made = axes({ width, height, lengthS, top, show, base, label: `${label}. Arrow keys read it out.` });
  const { svg, x, y } = made;
  const below = new Array(series[0].values.length).fill(0);
  series.forEach((one, n) => {
    const floor = stacked ? below.slice() : below;
    const upper = one.values.map((value, k) => value + (stacked ? floor[k] : 0));
    const line = upper.map((value, k) => `${k ? "L" : "M"}${x(k * partS)} ${y(value)}H${x((k + 1) * partS)}`).join("");
    const back = floor.map((value, k) => `L${x((k + 1) * partS)} ${y(value)}H${x(k * partS)}`).reverse().join("");
    const fill = one.fill || colour(n);
    svg.append(make("path", { class: "area", d: `${line}${back}Z`, fill, "fill-opacity": stacked ? 0.85 : 0.15, "data-name": one.name, "data-highest": highestOf(one.values) }));
    if (!stacked) svg.append(make("path", { class: "curve", d: line, fill: "none", stroke: fill, "stroke-width": 1.5 }));
    if (stacked) upper.forEach((value, k) => { below[k] = value; });
  });
  if (budget) {
    svg.append(make("line", { class: "budget", x1: x(0), x2: x(lengthS), y1: y(budget), y2: y(budget), "data-value": budget }));
    svg.append(make("text", { class: "over", x: x(lengthS) - 4, y: y(budget) - 4, "text-anchor": "end" }, `budget ${show(budget)}`));
  }
  const readout = make("div", { class: "readout", "aria-live": "polite" });
  const say = (k) => `${seconds(k * partS)}: ${series.map((one) => `${one.name} ${show(one.values[k])}`).join(", ")}`;
  readable(svg, made, series[0].values.length, (k) => x((k + 0.5) * partS), readout, say, (s) => Math.floor(s / partS), lengthS);
  return [svg, readout];
}

// Let the mouse and the arrow keys move a line over the picture, and write the values below it.
function readable(svg, { x, left }, count, place, readout, say, indexAt, lengthS) {
  const box = svg.viewBox.baseVal;
  const cursor = make("line", { class: "cursor", y1: TOP, y2: box.height - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  let at = -1;
  const show = (k) => {
    at = Math.max(0, Math.min(count - 1, k));
    cursor.setAttribute("x1", place(at));
    cursor.setAttribute("x2", place(at));
    cursor.setAttribute("visibility", "visible");
    readout.textContent = say(at);
  };
  svg.addEventListener("mousemove", (event) => {
    const share = (event.offsetX * (box.width / svg.clientWidth) - left) / (x(lengthS) - left);
    if (count) show(indexAt(share * lengthS));
  });
  svg.addEventListener("mouseleave", () => cursor.setAttribute("visibility", "hidden"));
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !count) return;
    event.preventDefault();
    show(moves[event.key] === Infinity ? count - 1 : moves[event.key] === -Infinity ? 0 : at + moves[event.key]);
  });
}
