// A line chart in SVG: several curves, hover, zoom by mouse, keyboard and buttons, logarithmic axes, smoothing.
//
// new Chart(figure, { title, x: "step" | "time", y: "number" | "bytes" | "percent", onZoom }) fills a <figure>;
// show(series) draws. A series is { id, label, colour, dash, points, gaps, exact, hidden }, where points are
// [x, min, max, mean, last] in order of x as the server gives them, gaps are [from, to] without numbers, and `whole`
// is what x spans where the points are only a part of it.
// Knows nothing of tasks or of the server. Colours are classes: see curves.css.
import {
  byteTicks, linearTicks, logTicks, nearest, shownBytes, shownNumber, shownPercent, shownSpan, smoothed, spanTicks,
} from "./scale.js";

const SVG = "http://www.w3.org/2000/svg";
const BOTTOM = 22, TOP = 8, RIGHT = 10, MIN_DRAG = 6;
const UNITS = {
  number: { ticks: linearTicks, shown: shownNumber },
  bytes: { ticks: byteTicks, shown: shownBytes },
  percent: { ticks: linearTicks, shown: shownPercent },
  step: { ticks: linearTicks, shown: (value) => shownNumber(value, 6) },
  time: { ticks: spanTicks, shown: shownSpan },
};

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function html(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// One for all, and the size as it says: to ask each chart for its size while others change makes hundreds of them slow.
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) { target.chart.size = contentRect; target.chart.draw(); }
});

export class Chart {
  constructor(figure, { title, x = "step", y = "number", legend = false, onZoom = () => {}, onSize = () => {} }) {
    Object.assign(this, { figure, title, x, y, legend, onZoom, onSize });
    this.series = [];
    this.logX = this.logY = false;
    this.weight = 0;
    this.range = null; // of x, where zoomed
    this.cursor = null;
    this.#build();
    this.plot.chart = this;
    sizes.observe(this.plot);
  }

  #build() {
    const tool = (text, name, act) => {
      const button = html("button", { type: "button", class: "tool", title: name }, text, html("span", { class: "hidden" }, ` ${name}: ${this.title}`));
      button.addEventListener("click", act);
      return button;
    };
    this.logButton = tool("log", "Logarithmic y axis", () => this.set({ logY: !this.logY }));
    this.logButton.setAttribute("aria-pressed", "false");
    this.resetButton = tool("reset", "Show everything", () => { this.zoom(null); this.plot.focus(); });
    this.resetButton.hidden = true;
    this.sizeButton = tool("larger", "Larger", () => this.#resize());
    this.sizeButton.setAttribute("aria-pressed", "false");
    this.head = html("figcaption", {}, html("bdi", { class: "title", title: this.title }, this.title), this.resetButton,
      tool("+", "Zoom in", () => this.#zoomBy(0.5)), tool("−", "Zoom out", () => this.#zoomBy(2)), this.logButton, this.sizeButton);
    this.plot = svg("svg", { class: "plot", role: "img", tabindex: "0" });
    this.readout = html("div", { class: "readout", hidden: "" });
    this.said = html("p", { class: "hidden", role: "status" });
    this.keys = html("ul", { class: "keys", "aria-label": `Curves of ${this.title}` });
    this.figure.replaceChildren(this.head, html("div", { class: "stage" }, this.plot, this.readout), this.keys, this.said);
    this.keys.hidden = true;

    this.plot.addEventListener("pointerdown", (event) => this.#press(event));
    this.plot.addEventListener("pointermove", (event) => this.#move(event));
    this.plot.addEventListener("pointerup", (event) => this.#release(event));
    this.plot.addEventListener("pointercancel", () => { this.dragged = null; this.draw(); });
    this.plot.addEventListener("pointerleave", () => { if (!this.dragged) this.#point(null); });
    this.plot.addEventListener("dblclick", () => this.zoom(null));
    this.plot.addEventListener("keydown", (event) => this.#type(event));
    this.plot.addEventListener("blur", () => this.#point(null));
  }

  show(series) {
    this.series = series;
    this.#listKeys();
    this.draw();
  }

  set(how) {
    Object.assign(this, how);
    this.logButton.setAttribute("aria-pressed", String(this.logY));
    this.draw();
  }

  zoom(range) {
    if (range && !(range[1] > range[0])) return;
    this.range = range;
    this.resetButton.hidden = !range;
    this.draw();
    this.onZoom(range);
  }

  #resize() {
    const large = this.figure.classList.toggle("large");
    this.sizeButton.setAttribute("aria-pressed", String(large));
    this.onSize(large);
  }

  get shownSeries() { return this.series.filter((each) => !each.hidden && each.points.length); }

  // ---- What the axes span ---------------------------------------------------------------------------------------

  #extent() {
    const shown = this.shownSeries;
    let [x0, x1] = [Infinity, -Infinity];
    for (const { points, gaps, whole = [points[0][0], Math.max(points.at(-1)[0], gaps.at(-1)?.[1] ?? -Infinity)] } of shown) {
      x0 = Math.min(x0, this.logX && !(whole[0] > 0) ? points.find((point) => point[0] > 0)?.[0] ?? Infinity : whole[0]);
      x1 = Math.max(x1, whole[1]);
    }
    this.whole = [x0, x1];
    if (this.range) [x0, x1] = this.range;
    if (this.logX && !(x0 > 0)) x0 = Number.isFinite(this.whole[0]) ? this.whole[0] : x1 / 1e6;
    if (!(x1 > x0)) [x0, x1] = this.logX ? [x0 / 2, x0 * 2] : [x0 - 0.5, x0 + 0.5];
    let [y0, y1] = [Infinity, -Infinity];
    for (const { points } of shown) {
      for (const [x, low, high] of points) {
        if (x < x0 || x > x1) continue;
        if (this.logY ? low > 0 : true) y0 = Math.min(y0, low);
        if (this.logY && low <= 0 && high > 0) y0 = Math.min(y0, high);
        y1 = Math.max(y1, high);
      }
    }
    if (this.logY && !(y1 > 0)) return null;
    if (!Number.isFinite(y0) || !Number.isFinite(y1)) [y0, y1] = this.logY ? [0.1, 1] : [0, 1];
    if (this.logY) [y0, y1] = y1 > y0 ? [y0 / (y1 / y0) ** 0.04, y1 * (y1 / y0) ** 0.04] : [y0 / 2, y1 * 2];
    else {
      const pad = (y1 - y0) * 0.05 || Math.abs(y1) * 0.1 || 0.5;
      // What is never negative (bytes, percents, most losses) has its nought at the bottom, not below.
      [y0, y1] = [y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad, y1 + pad];
      if (this.y !== "number") y0 = Math.min(y0, 0);
      if (this.y === "percent") y1 = Math.max(y1, 105);
      if (!Number.isFinite(y1 - y0)) [y0, y1] = [y0 / 2, y1 / 2];
    }
    return { x0, x1, y0, y1 };
  }

  #scales(width, height) {
    const extent = this.#extent();
    if (!extent) return null;
    const { x0, x1, y0, y1 } = extent;
    const about = Math.max(2, Math.floor((height - BOTTOM - TOP) / 34));
    const yTicks = this.logY ? logTicks(y0, y1, about) : UNITS[this.y].ticks(y0, y1, about);
    const yWords = yTicks.map((each) => UNITS[this.y].shown(each, 6));
    const left = Math.min(110, 14 + 6.6 * Math.max(2, ...yWords.map((each) => each.length)));
    const inner = { left, top: TOP, width: Math.max(20, width - left - RIGHT), height: Math.max(20, height - TOP - BOTTOM) };
    const along = (log, low, high) => log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
    const fx = along(this.logX, x0, x1), fy = along(this.logY, y0, y1);
    const back = this.logX ? (part) => x0 * (x1 / x0) ** part : (part) => x0 + part * (x1 - x0);
    const wide = Math.max(2, Math.floor(inner.width / 78));
    const xTicks = this.logX ? logTicks(x0, x1, wide) : UNITS[this.x].ticks(x0, x1, wide);
    return {
      ...extent, inner, xTicks, yTicks, yWords, back,
      px: (value) => fx(value) * inner.width,
      py: (value) => (1 - fy(value)) * inner.height,
    };
  }

  // ---- Drawing --------------------------------------------------------------------------------------------------

  draw() {
    const { width, height } = this.size ?? {};
    if (!width || !height) return;
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.plot.setAttribute("aria-label", this.summary());
    const scale = this.shownSeries.length ? this.#scales(width, height) : null;
    this.scale = scale;
    if (!scale) {
      const words = this.series.length === 0 ? "Loading …" : this.shownSeries.length ? "Nothing above 0 to show on a logarithmic axis"
        : this.series.some((each) => each.hidden) ? "No curve is switched on" : "No numbers yet";
      this.plot.replaceChildren(svg("text", { x: width / 2, y: height / 2, class: "none" }, words));
      return;
    }
    const { inner } = scale;
    const axes = svg("g", { class: "axes" });
    scale.yTicks.forEach((value, at) => {
      const y = inner.top + scale.py(value);
      axes.append(svg("line", { x1: inner.left, x2: inner.left + inner.width, y1: y, y2: y }), svg("text", { x: inner.left - 6, y: y + 4, class: "y" }, scale.yWords[at]));
    });
    for (const value of scale.xTicks) {
      const x = inner.left + scale.px(value);
      axes.append(svg("line", { x1: x, x2: x, y1: inner.top + inner.height, y2: inner.top + inner.height + 4 }),
        svg("text", { x: Math.min(x, width - 14), y: inner.top + inner.height + 17, class: "x" }, UNITS[this.x].shown(value)));
    }
    // An <svg> of its own clips what lies outside of the axes.
    const area = svg("svg", { x: inner.left, y: inner.top, width: inner.width, height: inner.height });
    for (const each of this.shownSeries) area.append(this.#curve(each, scale));
    this.marks = svg("g", { class: "marks" });
    area.append(this.marks);
    this.plot.replaceChildren(axes, area);
    if (this.cursor !== null) this.#point(this.cursor, false);
  }

  #curve(series, scale) {
    const group = svg("g", { class: `curve ${look(series)}` });
    const { points, gaps } = series;
    const usable = (value) => Number.isFinite(value) && (!this.logY || value > 0);
    // Only what is near the shown part: zoomed deep into a long curve, the rest is not worth a path.
    let from = 0, to = points.length;
    if (this.range) {
      const xs = points.map((point) => point[0]);
      from = Math.max(0, nearest(xs, scale.x0) - 2);
      to = Math.min(points.length, nearest(xs, scale.x1) + 3);
    }
    const parts = pieces(points.slice(from, to).filter((point) => !this.logX || point[0] > 0), gaps);
    const line = (value) => parts.map((part) => {
      let path = "", pen = "M";
      part.forEach((point, at) => {
        const y = value(point, at);
        if (!usable(y)) { pen = "M"; return; }
        path += `${pen}${scale.px(point[0]).toFixed(1)} ${scale.py(y).toFixed(1)}`;
        pen = "L";
      });
      return path && !path.includes("L") ? `${path}h0` : path; // a point alone is a dot
    }).join("");
    if (!series.exact) {
      const floor = scale.y0;
      group.append(svg("path", { class: "band", d: parts.map((part) => {
        const up = part.map((point) => `${scale.px(point[0]).toFixed(1)} ${scale.py(this.logY ? Math.max(point[2], floor) : point[2]).toFixed(1)}`);
        const down = part.map((point) => `${scale.px(point[0]).toFixed(1)} ${scale.py(this.logY ? Math.max(point[1], floor) : point[1]).toFixed(1)}`);
        return `M${up.concat(down.reverse()).join("L")}Z`;
      }).join("") }));
    }
    if (this.weight > 0) {
      group.append(svg("path", { class: "raw", d: line((point) => point[3]) }));
      const soft = new Map(points.map((point, at) => [point, at]));
      const values = this.#soft(series);
      group.append(svg("path", { class: "line", d: line((point) => values[soft.get(point)]) }));
    } else group.append(svg("path", { class: "line", d: line((point) => point[3]) }));
    for (const [first, last] of gaps) {
      const a = scale.px(first), b = scale.px(last), y = scale.inner.height;
      if (!(b >= 0 && a <= scale.inner.width)) continue;
      group.append(svg("path", { class: "gap", d: `M${a.toFixed(1)} ${y - 3}H${b.toFixed(1)}M${(a - 4).toFixed(1)} ${y - 10}l8 8m0 -8l-8 8` },
        svg("title", {}, `${series.label}: not a number at ${UNITS[this.x].shown(first)}`)));
    }
    return group;
  }

  #soft(series) {
    if (series.softOf !== series.points || series.softBy !== this.weight) {
      series.soft = smoothed(series.points.map((point) => point[3]), this.weight);
      series.softOf = series.points;
      series.softBy = this.weight;
    }
    return series.soft;
  }

  #listKeys() {
    this.keys.hidden = !this.legend || this.series.length < 2;
    if (this.keys.hidden) return;
    const before = this.keys.contains(document.activeElement) ? [...this.keys.children].indexOf(document.activeElement.closest("li")) : -1;
    this.keys.replaceChildren(...this.series.map((each) => html("li", {}, keyButton(each, () => {
      each.hidden = !each.hidden;
      this.#listKeys();
      this.draw();
    }))));
    if (before >= 0) this.keys.children[before]?.querySelector("button").focus();
  }

  // What somebody who does not see the picture should know.
  summary() {
    const { shown: y } = UNITS[this.y], { shown: x } = UNITS[this.x];
    const said = this.shownSeries.slice(0, 12).map(({ label, points, gaps }) => {
      let low = Infinity, high = -Infinity;
      for (const point of points) { low = Math.min(low, point[1]); high = Math.max(high, point[2]); }
      const from = x(points[0][0]), to = x(points.at(-1)[0]);
      return `${label}: ${this.x === "step" ? "steps" : "time"} ${from} to ${to}, lowest ${y(low)}, highest ${y(high)}, last ${y(points.at(-1)[4])}`
        + (gaps.length ? `, not a number in ${gaps.length === 1 ? "one place" : `${gaps.length} places`}` : "");
    });
    return `Chart of ${this.title}. ${said.join(". ") || "No numbers yet"}.`;
  }

  // ---- Reading values -------------------------------------------------------------------------------------------

  // Show the values nearest to x, or nothing for null.
  #point(x, aloud = false) {
    this.cursor = x;
    this.marks?.replaceChildren();
    const shown = this.shownSeries;
    this.readout.hidden = x === null || !shown.length || !this.scale;
    if (this.readout.hidden) return;
    const { scale } = this;
    // One x for all: that of the nearest sample of any curve.
    const at = shown.map((each) => each.points[nearest(this.#xs(each), x)][0]).reduce((best, one) => Math.abs(one - x) < Math.abs(best - x) ? one : best);
    this.at = at;
    const left = scale.px(at);
    this.marks.append(svg("line", { x1: left, x2: left, y1: 0, y2: scale.inner.height }));
    const words = UNITS[this.x].shown(at), unit = UNITS[this.y].shown;
    const lines = [], said = [];
    for (const each of shown) {
      const xs = this.#xs(each);
      if (at < xs[0] || at > xs.at(-1)) continue;
      const index = nearest(xs, at), point = each.points[index];
      if (each.gaps.some(([from, to]) => at >= from && at <= to)) {
        lines.push(row(each, "not a number", ""));
        said.push(`${each.label} not a number`);
        continue;
      }
      const value = this.weight > 0 ? this.#soft(each)[index] : point[3];
      const more = this.weight > 0 ? ` (${unit(point[3])})` : point[2] > point[1] ? ` (${unit(point[1])} to ${unit(point[2])})` : "";
      if (!this.logY || value > 0) this.marks.append(svg("circle", { class: `c${each.colour % 8}`, cx: scale.px(point[0]), cy: scale.py(value), r: 3.5 }));
      lines.push(row(each, unit(value, 5), more));
      said.push(`${each.label} ${unit(value, 5)}`);
    }
    const name = this.x === "step" ? `step ${words}` : words;
    this.readout.replaceChildren(html("p", {}, name), html("ul", {}, ...lines));
    const right = left > scale.inner.width / 2;
    this.readout.style.maxWidth = `${Math.max(110, (right ? left : scale.inner.width - left) - 14)}px`;
    this.readout.style.left = right ? "auto" : `${scale.inner.left + left + 10}px`;
    this.readout.style.right = right ? `${scale.inner.width - left + RIGHT + 10}px` : "auto";
    if (aloud) this.said.textContent = `${name}: ${said.join(", ")}`;
  }

  #xs(series) {
    if (series.xsOf !== series.points) {
      series.xs = series.points.map((point) => point[0]);
      series.xsOf = series.points;
    }
    return series.xs;
  }

  #dataX(event) {
    const box = this.plot.getBoundingClientRect();
    const part = (event.clientX - box.left - this.scale.inner.left) / this.scale.inner.width;
    return this.scale.back(Math.min(1, Math.max(0, part)));
  }

  #press(event) {
    if (event.button !== 0 || !this.scale) return;
    this.dragged = { from: this.#dataX(event), at: event.clientX };
    this.plot.setPointerCapture(event.pointerId);
  }

  #move(event) {
    if (!this.scale) return;
    const x = this.#dataX(event);
    this.#point(x);
    if (!this.dragged || Math.abs(event.clientX - this.dragged.at) < MIN_DRAG) return;
    const [a, b] = [this.scale.px(this.dragged.from), this.scale.px(x)].sort((one, other) => one - other);
    this.marks.append(svg("rect", { x: a, y: 0, width: b - a, height: this.scale.inner.height }));
  }

  #release(event) {
    const from = this.dragged;
    this.dragged = null;
    if (!from || !this.scale || Math.abs(event.clientX - from.at) < MIN_DRAG) return;
    this.zoom([from.from, this.#dataX(event)].sort((one, other) => one - other));
  }

  #zoomBy(factor) {
    if (!this.scale) return;
    const { x0, x1, px, back, inner } = this.scale;
    const middle = this.cursor !== null && this.at >= x0 && this.at <= x1 ? px(this.at) / inner.width : 0.5;
    this.#zoomTo(back(middle - middle * factor), back(middle + (1 - middle) * factor));
  }

  #zoomTo(low, high) {
    const [first, last] = this.whole;
    if (low <= first && high >= last) return this.zoom(null);
    this.zoom([Math.max(low, first), Math.min(high, last)]);
  }

  #type(event) {
    if (!this.scale || event.ctrlKey || event.metaKey || event.altKey) return;
    const { x0, x1 } = this.scale;
    const act = {
      "+": () => this.#zoomBy(0.5), "=": () => this.#zoomBy(0.5), "-": () => this.#zoomBy(2), "0": () => this.zoom(null),
      Escape: () => this.range ? this.zoom(null) : this.#point(null),
      ArrowLeft: () => event.shiftKey ? this.#pan(-0.2) : this.#step(-1), ArrowRight: () => event.shiftKey ? this.#pan(0.2) : this.#step(1),
      Home: () => this.#point(x0, true), End: () => this.#point(x1, true),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #pan(part) {
    if (!this.range) return;
    const { back } = this.scale, [first, last] = this.whole;
    const low = back(part), high = back(1 + part);
    if (low >= first && high <= last) this.zoom([low, high]);
  }

  #step(by) {
    const longest = this.shownSeries.reduce((best, each) => each.points.length > best.points.length ? each : best);
    const xs = this.#xs(longest), { x0, x1 } = this.scale;
    const now = this.cursor === null ? (by > 0 ? x0 : x1) : this.at;
    const next = this.cursor === null ? nearest(xs, now) : Math.min(xs.length - 1, Math.max(0, nearest(xs, now) + by));
    this.#point(xs[next], true);
  }
}

function swatch(series) { return html("span", { class: `swatch ${look(series)}` }); }

// Eight colours; after those, the same ones again with other dashes.
function look({ colour, dash }) { return `c${colour % 8} d${dash ?? Math.floor(colour / 8) % 4}`; }

function row(series, value, more) {
  return html("li", {}, swatch(series), html("bdi", {}, series.label), html("b", {}, value), html("span", {}, more));
}

// The points between gaps.
function pieces(points, gaps) {
  if (!gaps.length) return points.length ? [points] : [];
  const parts = [];
  let part = [], at = 0;
  for (const point of points) {
    let broken = false;
    while (at < gaps.length && gaps[at][0] < point[0]) { at += 1; broken = true; }
    if (broken && part.length) { parts.push(part); part = []; }
    part.push(point);
  }
  return part.length ? [...parts, part] : parts;
}

// A curve's colour and name, to switch it on and off.
export function keyButton(series, act) {
  const button = html("button", { type: "button", class: "key", "aria-pressed": String(!series.hidden) },
    swatch(series), html("bdi", {}, series.label));
  button.addEventListener("click", act);
  return button;
}
