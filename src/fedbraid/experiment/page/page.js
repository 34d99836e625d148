"use strict";
// Draws the plots of a report from the JSON in the page. It uses no library and no network.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "8 3 2 3"];
const AXES = { rounds: "round (number)", bytes: "sent so far, both ways (bytes)", seconds: "time since the start (seconds)", simulated: "simulated time (seconds)" };

// --- formatting --------------------------------------------------------------------------------------------------

function make(parent, tag, attributes = {}, text = null) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const colour = (i) => `var(--c${i % 7})`;
const dash = (i) => DASHES[Math.floor(i / 7) % DASHES.length];
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function amount(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 1000) return `${Number(value.toPrecision(3))} ${unit}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(3))} TB`;
}

const FORMATS = { rounds: (v) => String(Math.round(v)), bytes: amount, seconds: (v) => `${number(v)} s`, simulated: (v) => `${number(v)} s` };
const written = (value) => (typeof value === "number" ? number(value) : String(value));
const short = (key) => key.replace(/^algorithm\./, "");
const pretty = (metric) => metric.replace(/^test_/, "test ").replace("train/", "train ").replaceAll("_", " ");

// --- scales --------------------------------------------------------------------------------------------------------

function scale([low, high], [from, to], log) {
  if (log) {
    const a = Math.log10(low), b = Math.log10(high);
    return (v) => from + ((Math.log10(v) - a) / (b - a || 1)) * (to - from);
  }
  return (v) => from + ((v - low) / (high - low || 1)) * (to - from);
}

function ticks([low, high], count, log) {
  if (log && high / low >= 8) {
    const found = [];
    const decades = Math.log10(high / low);
    const marks = decades > 4 ? [1] : decades > 1.6 ? [1, 3] : [1, 2, 5];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += decades > 8 ? 2 : 1)
      for (const m of marks) {
        const v = Number((m * 10 ** e).toPrecision(6));
        if (v >= low * 0.999 && v <= high * 1.001) found.push(v);
      }
    return found;
  }
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Number(v.toPrecision(10)));
  return found;
}

function extent(values, log) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (known(v) && (!log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
  const pad = (high - low || Math.abs(high) || 1) * 0.05;
  return [low - pad, high + pad];
}

// --- a plot and its tip --------------------------------------------------------------------------------------------

// `draw(host, width)` fills a plot; it is called again when the width changes
function plot(parent, label, draw) {
  const host = make(parent, "div", { class: "plot", role: "img", "aria-label": label, tabindex: "0" });
  let width = 0;
  const again = () => {
    host.replaceChildren();
    if (width > 0) draw(host, width);
  };
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now !== width) { width = now; again(); }
  }).observe(host);
  return { host, again };
}

function tip(host, x, y, width, title, lines) {
  host.querySelector(".tip")?.remove();
  const box = make(host, "div", { class: "tip" });
  make(box, "b", {}, title);
  for (const [name, value, i] of lines) {
    const line = make(box, "span");
    make(line, "i", { style: i === null ? null : `color:${colour(i)}` }, name);
    make(line, "i", {}, value);
  }
  const left = x + 14 + box.offsetWidth > width ? Math.max(0, x - 14 - box.offsetWidth) : x + 14;
  box.style.left = `${left}px`;
  box.style.top = `${Math.max(0, y)}px`;
}

// --- lines ---------------------------------------------------------------------------------------------------------

// series: {label, index, x, y, low?, high?, thin?, raw?, marks?}; raw lines are drawn pale and have no tip
// options: {xName, yName, xLog, yLog, format, xRange?, onZoom?, references?}
function lines(host, width, series, options) {
  const height = Math.round(Math.min(420, Math.max(240, width * 0.52)));
  const box = { left: 70, right: width - 14, top: 10, bottom: height - 42 };
  const xs = extent(series.flatMap((s) => s.x), options.xLog);
  if (!options.xLog) { const all = series.flatMap((s) => s.x).filter(known); xs[0] = Math.min(...all); xs[1] = Math.max(...all); }
  if (options.xRange) [xs[0], xs[1]] = options.xRange;
  const shown = (s, column) => column.filter((_, i) => s.x[i] >= xs[0] && s.x[i] <= xs[1]);
  const values = series.flatMap((s) => [s.y, s.low ?? [], s.high ?? []].flatMap((column) => shown(s, column)));
  const ys = extent([...values, ...(options.references ?? []).map((r) => r.value)], options.yLog);
  if (options.floor !== undefined) ys[0] = Math.max(ys[0], options.floor);
  const x = scale(xs, [box.left, box.right], options.xLog), y = scale(ys, [box.bottom, box.top], options.yLog);
  const svg = make(host, "svg:svg", { viewBox: `0 0 ${width} ${height}`, height });
  for (const v of ticks(ys, 5, options.yLog)) {
    make(svg, "svg:line", { class: "grid", x1: box.left, x2: box.right, y1: y(v), y2: y(v) });
    make(svg, "svg:text", { x: box.left - 7, y: y(v) + 4, "text-anchor": "end" }, number(v));
  }
  for (const v of ticks(xs, Math.max(3, Math.floor(width / 110)), options.xLog))
    make(svg, "svg:text", { x: x(v), y: box.bottom + 17, "text-anchor": "middle" }, options.format(v));
  make(svg, "svg:line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
  make(svg, "svg:text", { class: "label", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, options.xName);
  if (options.yName) make(svg, "svg:text", { class: "label", "text-anchor": "middle", transform: `translate(14 ${(box.top + box.bottom) / 2}) rotate(-90)` }, options.yName);
  // an inner svg element clips what is outside of a zoomed part
  const [wide, high] = [box.right - box.left + 8, box.bottom + 4];
  const drawn = make(svg, "svg:svg", { x: box.left - 4, y: 0, width: wide, height: high, viewBox: `${box.left - 4} 0 ${wide} ${high}`, style: `overflow:hidden;width:${wide}px` });
  for (const r of options.references ?? []) {
    make(svg, "svg:line", { class: "reference", x1: box.left, x2: box.right, y1: y(r.value), y2: y(r.value) });
    make(svg, "svg:text", { x: box.right - 4, y: y(r.value) - 5, "text-anchor": "end" }, `${r.label} ${number(r.value)}`);
  }
  const inside = (v) => known(v) && (!options.yLog || v > 0);
  for (const s of series) {
    if (s.low && s.x.length > 1) {
      const there = s.x.map((v, i) => [v, s.low[i], s.high[i]]).filter(([, a, b]) => inside(a) && inside(b));
      const edge = [...there.map(([v, , b]) => `${x(v)},${y(b)}`), ...there.reverse().map(([v, a]) => `${x(v)},${y(a)}`)];
      make(drawn, "svg:polygon", { class: "band", points: edge.join(" "), style: `fill:${colour(s.index)}` });
    }
    let path = "", pen = "M", count = 0; // a value that cannot be drawn leaves a gap
    s.x.forEach((v, i) => {
      const seen = inside(s.y[i]) && (!options.xLog || v > 0);
      if (seen) { path += `${pen}${x(v)},${y(s.y[i])}`; count += 1; }
      pen = seen ? "L" : "M";
    });
    const look = { style: `stroke:${colour(s.index)}`, "stroke-dasharray": dash(s.index) || null };
    if (path) make(drawn, "svg:path", { class: s.raw ? "raw" : s.thin ? "line thin" : "line", fill: "none", d: path, ...look });
    if (s.marks || count === 1)
      s.x.forEach((v, i) => { if (inside(s.y[i])) make(drawn, "svg:circle", { cx: x(v), cy: y(s.y[i]), r: 3.2, style: `fill:${colour(s.index)}` }); });
  }
  options.extra?.(svg, x, y, box);
  const over = make(svg, "svg:g");
  const seek = (at) => {
    const found = [];
    for (const s of series) {
      let best = -1;
      if (s.raw) continue;
      for (let i = 0; i < s.x.length; i++)
        if (inside(s.y[i]) && s.x[i] >= xs[0] && s.x[i] <= xs[1] && (best < 0 || Math.abs(x(s.x[i]) - at) < Math.abs(x(s.x[best]) - at))) best = i;
      if (best >= 0) found.push([s, best]);
    }
    if (!found.length) return;
    const [first, j] = found.reduce((a, b) => (Math.abs(x(b[0].x[b[1]]) - at) < Math.abs(x(a[0].x[a[1]]) - at) ? b : a));
    over.replaceChildren();
    make(over, "svg:line", { class: "cross", x1: x(first.x[j]), x2: x(first.x[j]), y1: box.top, y2: box.bottom });
    const rows = found.map(([s, i]) => {
      make(over, "svg:circle", { cx: x(s.x[i]), cy: y(s.y[i]), r: 4, style: `fill:${colour(s.index)}` });
      const spread = s.low && s.high[i] > s.low[i] ? ` (${number(s.low[i])} to ${number(s.high[i])})` : "";
      return [s.label, number(s.y[i]) + spread, s.index, s.y[i]];
    });
    rows.sort((a, b) => b[3] - a[3]);
    tip(host, x(first.x[j]), box.top, width, `${options.xTip ?? options.xName} ${options.format(first.x[j])}`, rows);
  };
  listen(host, svg, seek, () => over.replaceChildren(), box);
  if (options.onZoom) dragToZoom(svg, box, (from, to) => options.onZoom([from, to].map((at) => xs[0] + ((at - box.left) / (box.right - box.left)) * (xs[1] - xs[0]))));
}

// dragging over a plot with a mouse or a pen marks a part of the horizontal axis; a double click shows all again
function dragToZoom(svg, box, zoom) {
  let from = null, mark = null;
  const at = (event) => Math.min(box.right, Math.max(box.left, event.clientX - svg.getBoundingClientRect().left));
  const end = () => { mark?.remove(); from = mark = null; };
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button !== 0) return; // touch moves the cursor
    event.preventDefault();
    from = at(event);
    mark = make(svg, "svg:rect", { class: "drag", x: from, width: 0, y: box.top, height: box.bottom - box.top });
  });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return;
    mark.setAttribute("x", Math.min(from, at(event)));
    mark.setAttribute("width", Math.abs(at(event) - from));
  });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [low, high] = [Math.min(from, at(event)), Math.max(from, at(event))];
    end();
    if (high - low > 8) zoom(low, high);
  });
  svg.addEventListener("pointerleave", end);
}

// exponential moving average without a bias towards its first value; missing values stay missing
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((v) => {
    if (!known(v)) return v;
    sum = weight * sum + (1 - weight) * v;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// pointer, touch and arrow keys move a cursor along x
function listen(host, svg, seek, clear, box) {
  let at = null;
  const leave = () => { clear(); host.querySelector(".tip")?.remove(); at = null; };
  svg.addEventListener("pointermove", (event) => seek((at = event.clientX - svg.getBoundingClientRect().left)));
  svg.addEventListener("pointerdown", (event) => seek((at = event.clientX - svg.getBoundingClientRect().left)));
  svg.addEventListener("pointerleave", leave);
  host.onblur = leave;
  host.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(box.right, Math.max(box.left, (at ?? box.left) + step * (box.right - box.left) * 0.02));
    seek(at);
  };
}

// --- maps ----------------------------------------------------------------------------------------------------------

const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

function shade(share) {
  const at = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1);
  const i = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return VIRIDIS[i].map((v, k) => Math.round(v + (VIRIDIS[i + 1][k] - v) * (at - i)));
}

const rgb = ([r, g, b]) => `rgb(${r},${g},${b})`;

// from a score to its place between the worst (0) and the best (1)
function shares(tuning, points) {
  const scores = points.map((p) => p.score).filter(known);
  const low = Math.min(...scores), high = Math.max(...scores);
  return (score) => (tuning.better === "lower" ? high - score : score - low) / (high - low || 1);
}

function isBest(tuning, values) {
  return tuning.best !== null && tuning.keys.every((key, i) => JSON.stringify(tuning.best[key]) === JSON.stringify(values[i]));
}

function map(host, width, tuning) {
  const left = 14 + 7 * Math.max(4, ...tuning.ys.map((v) => written(v).length)), bottom = 58;
  const cell = { w: (width - left - 6) / tuning.xs.length, h: Math.min(44, Math.max(24, 300 / tuning.ys.length)) };
  const height = cell.h * tuning.ys.length + bottom + 8;
  const svg = make(host, "svg:svg", { viewBox: `0 0 ${width} ${height}`, height });
  const share = shares(tuning, tuning.cells);
  const row = (y) => 8 + (tuning.ys.length - 1 - y) * cell.h;
  for (const c of tuning.cells) {
    const at = { x: left + c.x * cell.w, y: row(c.y) };
    const fill = known(c.score) ? shade(share(c.score)) : null;
    const rect = make(svg, "svg:rect", { class: "cell", ...at, width: cell.w - 1, height: cell.h - 1, style: `fill:${fill ? rgb(fill) : "var(--grid)"}` });
    const middle = { x: at.x + cell.w / 2, y: at.y + cell.h / 2 + 4, "text-anchor": "middle" };
    const light = fill && 0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2] > 140;
    if (cell.w > 34 && fill) make(svg, "svg:text", { ...middle, style: `fill:${light ? "#111" : "#fff"};pointer-events:none` }, Number(c.score.toPrecision(3)));
    if (!fill) make(svg, "svg:text", { ...middle, style: "fill:var(--c1);pointer-events:none" }, c.status === "diverged" ? "×" : "·");
    const tell = () => tip(host, at.x + cell.w / 2, at.y, width, known(c.score) ? `${tuning.metric} ${number(c.score)}` : c.status, [
      [short(tuning.x), written(tuning.xs[c.x]), null], [short(tuning.y), written(tuning.ys[c.y]), null]]);
    rect.addEventListener("pointermove", tell);
    rect.addEventListener("pointerdown", tell);
  }
  const best = tuning.points.find((p) => isBest(tuning, p.values));
  if (best) {
    const at = (key, all) => all.findIndex((v) => JSON.stringify(v) === JSON.stringify(best.values[tuning.keys.indexOf(key)]));
    make(svg, "svg:rect", { class: "best", x: left + at(tuning.x, tuning.xs) * cell.w, y: row(at(tuning.y, tuning.ys)), width: cell.w - 1, height: cell.h - 1 });
  }
  const every = Math.ceil(44 / cell.w);
  tuning.xs.forEach((v, i) => {
    if (i % every === 0) make(svg, "svg:text", { x: left + (i + 0.5) * cell.w, y: height - bottom + 24, "text-anchor": "middle" }, written(v));
  });
  tuning.ys.forEach((v, i) => make(svg, "svg:text", { x: left - 6, y: row(i) + cell.h / 2 + 4, "text-anchor": "end" }, written(v)));
  make(svg, "svg:text", { class: "label", x: left + (width - left) / 2, y: height - 8, "text-anchor": "middle" }, `${short(tuning.x)} →   ↑ ${short(tuning.y)}`);
  svg.addEventListener("pointerleave", () => host.querySelector(".tip")?.remove());
}

function scatter(host, width, tuning) {
  const height = Math.round(Math.min(340, Math.max(240, width * 0.6)));
  const box = { left: 54, right: width - 14, top: 10, bottom: height - 42 };
  const [i, j] = [tuning.keys.indexOf(tuning.x), tuning.keys.indexOf(tuning.y)];
  const x = scale(extent(tuning.points.map((p) => p.values[i]), tuning.log[0]), [box.left, box.right], tuning.log[0]);
  const y = scale(extent(tuning.points.map((p) => p.values[j]), tuning.log[1]), [box.bottom, box.top], tuning.log[1]);
  const svg = make(host, "svg:svg", { viewBox: `0 0 ${width} ${height}`, height });
  for (const v of ticks(extent(tuning.points.map((p) => p.values[j]), tuning.log[1]), 5, tuning.log[1])) {
    make(svg, "svg:line", { class: "grid", x1: box.left, x2: box.right, y1: y(v), y2: y(v) });
    make(svg, "svg:text", { x: box.left - 7, y: y(v) + 4, "text-anchor": "end" }, number(v));
  }
  for (const v of ticks(extent(tuning.points.map((p) => p.values[i]), tuning.log[0]), 4, tuning.log[0]))
    make(svg, "svg:text", { x: x(v), y: box.bottom + 17, "text-anchor": "middle" }, number(v));
  make(svg, "svg:text", { class: "label", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, `${short(tuning.x)} →   ↑ ${short(tuning.y)}`);
  const share = shares(tuning, tuning.points);
  for (const p of tuning.points) {
    const at = { cx: x(p.values[i]), cy: y(p.values[j]), r: 6 };
    const fill = known(p.score) ? rgb(shade(share(p.score))) : "none";
    const dot = make(svg, "svg:circle", { class: isBest(tuning, p.values) ? "best" : null, ...at, style: `fill:${fill};${known(p.score) ? "" : "stroke:var(--c1)"}` });
    const tell = () => tip(host, at.cx, at.cy, width, known(p.score) ? `${tuning.metric} ${number(p.score)}` : p.status, tuning.keys.map((key, k) => [short(key), written(p.values[k]), null]));
    dot.addEventListener("pointermove", tell);
    dot.addEventListener("pointerdown", tell);
  }
  svg.addEventListener("pointerleave", () => host.querySelector(".tip")?.remove());
}

function tuningLine(host, width, tuning) {
  const k = tuning.keys.indexOf(tuning.x);
  const place = tuning.named ? (v) => tuning.xs.findIndex((w) => JSON.stringify(w) === JSON.stringify(v)) : (v) => v;
  const scored = tuning.points.filter((p) => known(p.score)).sort((a, b) => place(a.values[k]) - place(b.values[k]));
  const spread = scored.some((p) => p.spread > 0);
  const one = { label: tuning.metric, index: 0, marks: true, x: scored.map((p) => place(p.values[k])), y: scored.map((p) => p.score) };
  if (spread) Object.assign(one, { low: scored.map((p) => p.score - p.spread), high: scored.map((p) => p.score + p.spread) });
  const lost = tuning.points.filter((p) => p.status === "diverged").map((p) => place(p.values[k]));
  const ghost = { label: "diverged", index: 1, x: lost, y: lost.map(() => null) };
  lines(host, width, [one, ghost], {
    xName: short(tuning.x), yName: pretty(tuning.metric), xTip: short(tuning.x), xLog: tuning.log[0] && !tuning.named,
    format: (v) => (tuning.named ? written(tuning.xs[Math.round(v)] ?? "") : number(v)),
    extra: (svg, x, y, box) => {
      for (const v of lost)
        for (const [a, b] of [[-5, 5], [5, -5]])
          make(svg, "svg:line", { class: "lost", x1: x(v) - 5, x2: x(v) + 5, y1: box.bottom - 10 + a, y2: box.bottom - 10 + b });
      const best = scored.find((p) => isBest(tuning, p.values));
      if (best) make(svg, "svg:circle", { class: "best", cx: x(place(best.values[k])), cy: y(best.score), r: 8 });
    },
  });
}

// --- sections ------------------------------------------------------------------------------------------------------

function choices(parent, names, chosen, label, change) {
  const group = make(parent, "div", { class: "choices", role: "group", "aria-label": label });
  const buttons = names.map(([value, text]) => {
    const button = make(group, "button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen) }, text);
    button.onclick = () => {
      for (const b of buttons) b.setAttribute("aria-pressed", String(b === button));
      change(value);
    };
    return button;
  });
}

function select(parent, names, label, change, chosen = null) {
  const box = make(parent, "select", { "aria-label": label });
  for (const [value, text] of names) make(box, "option", { value }, text);
  if (chosen !== null) box.value = chosen;
  box.onchange = () => change(box.value);
}

// buttons that show and hide series; `hidden` is the set of hidden labels
function legend(parent, hidden, change) {
  if (data.labels.length < 2) return;
  const box = make(parent, "div", { class: "legend" });
  data.labels.forEach((label, i) => {
    const button = make(box, "button", { type: "button", "aria-pressed": "true" });
    const key = make(button, "svg:svg", { viewBox: "0 0 26 10" });
    make(key, "svg:line", { x1: 1, x2: 25, y1: 5, y2: 5, style: `stroke:${colour(i)}`, "stroke-width": 3, "stroke-dasharray": dash(i) || null });
    make(button, "span", {}, label);
    button.onclick = () => {
      if (!hidden.delete(label)) hidden.add(label);
      button.setAttribute("aria-pressed", String(!hidden.has(label)));
      change();
    };
  });
}

function open(id) {
  const section = document.getElementById(id);
  section.hidden = false;
  return section;
}

// on a page that is read again (`fedbraid report --live`), what a reader chose stays
const LIVE = document.querySelector("meta[http-equiv=refresh]") !== null;

function remembered(defaults) {
  try { return { ...defaults, ...(LIVE ? JSON.parse(sessionStorage.getItem(document.title) ?? "{}") : {}) }; } catch { return defaults; }
}

function remember({ metric, axis, log, each, smooth, zoom }) {
  if (!LIVE) return;
  try { sessionStorage.setItem(document.title, JSON.stringify({ metric, axis, log, each, smooth, zoom })); } catch { /* not allowed here */ }
}

function seriesOf(state) {
  const series = [];
  for (const s of data.curves[state.metric].series) {
    const line = s.axes[state.axis];
    if (!line || state.hidden.has(s.label)) continue;
    const index = data.labels.indexOf(s.label);
    const own = state.each
      ? line.each.map(([x, y], i) => ({ label: `${s.label}, seed ${s.seeds[i]}`, index, x, y, thin: true }))
      : [{ label: s.label, index, x: line.x, y: line.mean, low: line.low, high: line.high }];
    for (const one of own) {
      if (!state.smooth) { series.push(one); continue; }
      const even = (column) => column && smoothed(column, state.smooth);
      series.push({ ...one, raw: true, low: undefined }, { ...one, y: even(one.y), low: even(one.low), high: even(one.high) });
    }
  }
  return series;
}

function showCurves() {
  const metrics = Object.keys(data.curves).filter((m) => data.curves[m].series.some((s) => Object.keys(s.axes).length));
  if (!metrics.length) return;
  const section = open("curves");
  const state = remembered({ metric: metrics[0], axis: "rounds", log: data.curves[metrics[0]].log, each: false, smooth: 0, zoom: null });
  if (!metrics.includes(state.metric)) state.metric = metrics[0];
  state.hidden = new Set();
  const controls = make(section, "div", { class: "controls" });
  const axes = Object.keys(AXES).filter((a) => metrics.some((m) => data.curves[m].series.some((s) => s.axes[a])));
  if (!axes.includes(state.axis)) state.axis = "rounds";
  const view = plot(make(null, "div"), "metric against rounds, bytes, seconds or simulated time", (host, width) => {
    const series = seriesOf(state);
    remember(state);
    all.disabled = !state.zoom;
    if (!series.length) { make(host, "p", { class: "note" }, "nothing to show"); return; }
    lines(host, width, series, {
      xName: AXES[state.axis], xTip: { rounds: "round", bytes: "sent", seconds: "after", simulated: "after" }[state.axis], yLog: state.log, format: FORMATS[state.axis],
      yName: `${pretty(state.metric)} (${data.curves[state.metric].better} is better)`,
      references: data.baselines.filter((b) => b.metric === state.metric && (!state.log || b.value > 0)),
      xRange: state.zoom, onZoom: zoom });
  });
  const zoom = (range) => { state.zoom = range; view.again(); };
  const closer = (factor) => {
    const xs = seriesOf(state).flatMap((s) => s.x).filter(known);
    const [low, high] = state.zoom ?? [Math.min(...xs), Math.max(...xs)];
    const half = ((high - low) / 2) * factor, middle = (low + high) / 2;
    const range = [Math.max(Math.min(...xs), middle - half), Math.min(Math.max(...xs), middle + half)];
    zoom(range[0] <= Math.min(...xs) && range[1] >= Math.max(...xs) ? null : range);
  };
  select(controls, metrics.map((m) => [m, pretty(m)]), "metric", (m) => {
    state.metric = m;
    state.log = data.curves[m].log;
    logButton.setAttribute("aria-pressed", String(state.log));
    view.again();
  }, state.metric);
  choices(controls, axes.map((a) => [a, a]), state.axis, "horizontal axis", (a) => { state.axis = a; zoom(null); });
  const logButton = make(controls, "button", { type: "button", "aria-pressed": String(state.log) }, "log scale");
  logButton.onclick = () => { state.log = !state.log; logButton.setAttribute("aria-pressed", String(state.log)); view.again(); };
  const several = data.curves[metrics[0]].series.some((s) => s.seeds.length > 1);
  if (several) {
    const each = make(controls, "button", { type: "button", "aria-pressed": String(state.each) }, "each seed");
    each.onclick = () => { state.each = !state.each; each.setAttribute("aria-pressed", String(state.each)); view.again(); };
  } else state.each = false;
  const group = make(controls, "div", { class: "choices", role: "group", "aria-label": "zoom" });
  make(group, "button", { type: "button", title: "zoom in; or drag over the plot" }, "zoom +").onclick = () => closer(0.5);
  make(group, "button", { type: "button", title: "zoom out" }, "zoom −").onclick = () => closer(2);
  const all = make(group, "button", { type: "button", title: "show the whole axis; or click the plot twice" }, "all");
  all.onclick = () => zoom(null);
  view.host.ondblclick = () => zoom(null);
  const label = make(controls, "label", { title: "exponential moving average; 0 shows the values as they are" }, "smoothing");
  const slider = make(label, "input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth });
  const told = make(label, "output", {}, Number(state.smooth).toFixed(2));
  slider.oninput = () => { state.smooth = Number(slider.value); told.textContent = state.smooth.toFixed(2); view.again(); };
  legend(section, state.hidden, view.again);
  section.append(view.host);
  const notes = several ? "Lines are means over seeds; bands go from the smallest to the largest value. " : "";
  const dotted = data.baselines.length ? "Dotted lines are the baselines of the comparison, at the end of their training. " : "";
  make(section, "p", { class: "note" }, `${notes}${dotted}Drag over the plot to zoom; click it twice to see all.`);
}

function showTunings() {
  if (!data.tunings.length) return;
  const section = open("tunings");
  make(section, "p", { class: "note" }, "Scores on a validation split of the training examples, at tuning seeds. A ring marks the best point, crosses mark diverged points.");
  const grid = make(section, "div", { class: data.tunings.length > 1 ? "many" : "" });
  for (const tuning of data.tunings) {
    const box = make(grid, "div");
    make(box, "h3", {}, tuning.label);
    const others = tuning.keys.filter((key) => key !== tuning.x && key !== tuning.y);
    const more = tuning.kind === "map" && others.length ? `; best over ${others.map(short).join(", ")}` : "";
    plot(box, `tuning of ${tuning.label}`, (host, width) => ({ line: tuningLine, map, scatter })[tuning.kind](host, width, tuning));
    make(box, "p", { class: "note" }, tuning.criterion + more);
  }
}

function showClients() {
  const metrics = Object.keys(data.clients);
  if (!metrics.length) return;
  const section = open("clients");
  const state = { metric: metrics[0], hidden: new Set() };
  const controls = make(section, "div", { class: "controls" });
  select(controls, metrics.map((m) => [m, pretty(m)]), "metric of the clients", (m) => { state.metric = m; view.again(); });
  legend(section, state.hidden, () => view.again());
  const view = plot(section, "each client's own metric, from worst to best", (host, width) => {
    const series = data.clients[state.metric].filter((s) => !state.hidden.has(s.label)).map((s) => ({
      label: s.label, index: data.labels.indexOf(s.label), y: s.values, x: s.values.map((_, i) => ((i + 0.5) / s.values.length) * 100) }));
    if (!series.length) { make(host, "p", { class: "note" }, "nothing to show"); return; }
    lines(host, width, series, { xName: "clients, worst to best (percentile)", yName: `${pretty(state.metric)} of the client`, xTip: "percentile", format: (v) => number(Math.round(v)) });
  });
  make(section, "p", { class: "note" }, "Each test client's own value under the last model; the clients of all seeds are shown together.");
}

function showDrift() {
  if (!data.drift.length) return;
  const section = open("drift");
  const peaks = data.drift.map((d) => Math.max(...d.rounds.flat()));
  const state = { hidden: new Set(), log: Math.max(...peaks) > 20 * Math.min(...peaks) && Math.min(...peaks) > 0 };
  const logButton = make(make(section, "div", { class: "controls" }), "button", { type: "button", "aria-pressed": String(state.log) }, "log scale");
  logButton.onclick = () => { state.log = !state.log; logButton.setAttribute("aria-pressed", String(state.log)); view.again(); };
  legend(section, state.hidden, () => view.again());
  const view = plot(section, "client drift over local steps", (host, width) => {
    const series = [];
    for (const d of data.drift) {
      if (state.hidden.has(d.label)) continue;
      let before = 0;
      const x = [], y = [];
      for (const row of d.rounds) { row.forEach((v, k) => { x.push(before + k); y.push(v); }); before += row.length - 1; }
      series.push({ label: d.label, index: data.labels.indexOf(d.label), x, y });
    }
    if (!series.length) { make(host, "p", { class: "note" }, "nothing to show"); return; }
    lines(host, width, series, { xName: "local steps since the start (number)", yName: "mean squared distance", xTip: "step", yLog: state.log, floor: state.log ? undefined : 0, format: FORMATS.rounds });
  });
  make(section, "p", { class: "note" }, "Mean squared distance of the clients' models from their mean (the shadow sequence) at every local step of the first rounds. Every round starts again at 0 (on a log scale: with a gap).");
}

function theme() {
  const root = document.documentElement, button = document.getElementById("theme");
  button.onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  };
}

// a click on a column's head sorts the rows by it; rows that are set apart stay where they are
function sortable(table) {
  const heads = [...table.querySelectorAll("thead th")];
  const value = (row, j) => {
    const cell = row.children[j], text = cell.textContent.trim(), plain = Number(cell.dataset.value ?? text.match(/^-?[\d.]+(e[-+]?\d+)?/i)?.[0] ?? NaN);
    return [plain, text];
  };
  heads.forEach((head, j) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0], sign = down ? -1 : 1;
      const compare = ([a, s], [b, t]) => {
        if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1; // rows without a number come last
        return sign * (Number.isNaN(a) ? s.localeCompare(t) : a - b);
      };
      body.append(...[...body.rows].sort((p, q) => compare(value(p, j), value(q, j))));
    };
    head.onclick = sort;
    head.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } };
  });
}

theme();
document.querySelectorAll("table").forEach(sortable);
showCurves();
showTunings();
showClients();
showDrift();
document.documentElement.dataset.ready = "true";
