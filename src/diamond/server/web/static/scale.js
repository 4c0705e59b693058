// Numbers on axes: where ticks go, how values read, how a curve is smoothed. Knows neither page nor drawing.

// Round numbers from low to high, about so many.
export function linearTicks(low, high, about) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  return every(niceStep(span / Math.max(1, about)), low, high);
}

function niceStep(rough) {
  const ten = 10 ** Math.floor(Math.log10(rough));
  return ten * ([1, 2, 5, 10].find((each) => each * ten >= rough * 0.999) ?? 10);
}

function every(step, low, high) {
  const ticks = [];
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  for (let at = first; at <= last && ticks.length < 50; at++) ticks.push(at * step);
  return ticks;
}

// Powers of ten; with 2 and 5 between them where there is room, and round numbers where there is not one power.
export function logTicks(low, high, about) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const decades = Math.log10(high / low);
  const steps = decades <= about / 3 ? [1, 2, 5] : [1];
  const skip = Math.max(1, Math.ceil(decades / Math.max(1, about)));
  const ticks = [];
  for (let power = first; power <= last; power++) {
    if ((power - first) % skip) continue;
    for (const each of steps) {
      const value = each * 10 ** power;
      if (value >= low * 0.999999 && value <= high * 1.000001) ticks.push(value);
    }
  }
  return ticks.length >= 2 ? ticks : linearTicks(low, high, about).filter((each) => each > 0);
}

const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

// Seconds, at steps that clocks have.
export function spanTicks(low, high, about) {
  const rough = (high - low) / Math.max(1, about);
  if (!(rough > 0)) return [low];
  if (rough < 1) return linearTicks(low, high, about);
  return every(SPANS.find((each) => each >= rough) ?? niceStep(rough / 604800) * 604800, low, high);
}

// Binary steps, so that memory has round ticks.
export function byteTicks(low, high, about) {
  const rough = Math.max(1, (high - low) / Math.max(1, about));
  const unit = 1024 ** Math.min(5, Math.max(0, Math.floor(Math.log2(rough) / 10)));
  const step = rough / unit > 500 ? 1024 * unit : niceStep(rough / unit) * unit;
  return every(step, low, high);
}

// As few digits as tell values apart: 0.0312, 12.5, 1.2e-7, 12 000.
export function shownNumber(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 10 ** digits) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return String(Number(value.toPrecision(digits)));
}

export function shownBytes(value, digits = 3) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${Number(value.toPrecision(Math.abs(value) >= 1000 ? 4 : digits))} ${units[at]}`;
}

export function shownPercent(value) { return `${shownNumber(value, 3)} %`; }

// 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h: the two largest parts.
export function shownSpan(seconds) {
  const size = Math.abs(seconds);
  if (size < 60) return `${shownNumber(seconds, size < 10 ? 3 : 2)} s`;
  let rest = Math.round(size), words = [];
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const count = Math.floor(rest / length);
    rest -= count * length;
    if (count) words.push(`${count} ${unit}`);
    if (count && words.length === 2) break;
    if (words.length === 1 && !count) break;
  }
  return (seconds < 0 ? "−" : "") + words.join(" ");
}

// Exponential moving average that does not start at nought: each value is divided by the weight it has seen.
export function smoothed(values, weight) {
  let sum = 0, seen = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return sum / seen;
  });
}

// The place of the number nearest to x in an ascending list.
export function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}
