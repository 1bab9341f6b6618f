// Phasors of rotary pairs, bars of their turns, and the heat map of distances.
const percent = (share) => `${Math.round(100 * share)} %`;

/** A count as words: 0.31, 12, 1,204. */
const count = (x) => (x >= 100 ? Math.round(x).toLocaleString("en") : x >= 9.95 ? x.toFixed(0) : +x.toPrecision(2) + "");

/** A pie from one angle to another, counted from the right, against the clock. */
function sector(from, to, kind) {
  if (to - from <= 1e-4) return "";
  if (to - from >= TURN - 1e-6) return `<circle r="42" class="${kind}"/>`;
  const point = (angle) => `${(42 * Math.cos(angle)).toFixed(2)} ${(-42 * Math.sin(angle)).toFixed(2)}`;
  return `<path class="${kind}" d="M0 0L${point(from)}A42 42 0 ${to - from > Math.PI ? 1 : 0} 0 ${point(to)}Z"/>`;
}

/** One pair: what training covered, what the longer text adds, and its hand at an angle. */
function dial(trained, reached, angle) {
  const seen = Math.min(trained, TURN), end = Math.min(reached, TURN);
  const x = (42 * Math.cos(angle)).toFixed(2), y = (-42 * Math.sin(angle)).toFixed(2);
  return `<svg viewBox="-48 -48 96 96" aria-hidden="true"><circle r="42" class="dial-ring"/>${sector(0, seen, "dial-seen")}${sector(seen, end, "dial-unseen")}<path class="dial-hand" d="M0 0L${x} ${y}"/></svg>`;
}

/** How much of the circle a pair reaches beyond what training covered: 0 to 1. */
const unseenShare = (trained, reached) => Math.max(0, Math.min(reached, TURN) - Math.min(trained, TURN)) / TURN;
const saw = (share) => (share > 0.0005 ? `<span class="bad">${percent(share)} untrained</span>` : "all trained");

/** Dials of some pairs, as they are and with a method, at a position. */
function drawDials(host, pairs, yours, before, after, rope, length, position, name) {
  const cards = pairs.map((i, k) => {
    const trained = rope.window * before[i], sides = [["unscaled", before[i]], [name, after[i]]];
    const drawn = sides.map(([words, f]) => {
      const share = unseenShare(trained, length * f);
      return `${dial(trained, length * f, (position * f) % TURN)}<p class="side">${escaped(words)}<br>${saw(share)}</p>`;
    });
    const turns = trained / TURN;
    return `<div${k === yours ? ' class="yours"' : ""}><b>pair ${i + 1}</b>${turns >= 1 ? `${count(turns)} turns` : `${percent(turns)} of a turn`} in training${drawn.join("")}</div>`;
  });
  host.innerHTML = cards.join("");
  const worst = (f) => Math.max(...pairs.map((i) => unseenShare(rope.window * before[i], length * f[i])));
  host.setAttribute("aria-label", `${pairs.length} rotary pairs. Unscaled, up to ${percent(worst(before))} of a circle was never trained; with ${name}, ${percent(worst(after))}.`);
}

/** A bar per pair: turns in training, and what the target adds, on a logarithmic scale. */
function drawStrip(host, before, after, rope, length, chosen) {
  const width = widthOf(host), height = 150, n = before.length, step = (width - 50) / n;
  const trained = Array.from(before, (f) => (rope.window * f) / TURN), reached = Array.from(after, (f) => (length * f) / TURN);
  const low = Math.max(1e-4, Math.min(...trained.filter((x) => x > 0)) / 3), high = Math.max(...trained, ...reached, 10);
  const y = scale([low, high], true, height - 18, 26 - height), one = y(1).toFixed(1), parts = [];
  for (let i = 0; i < n; i++) {
    const x = (50 + i * step).toFixed(1), w = Math.max(0.8, step - 1).toFixed(1);
    const top = y(Math.max(trained[i], low)), end = y(Math.max(reached[i], low)), bad = unseenShare(TURN * trained[i], TURN * reached[i]) > 0.0005;
    parts.push(`<rect x="${x}" y="${top.toFixed(1)}" width="${w}" height="${(height - 18 - top).toFixed(1)}" fill="var(--blue)" opacity="${i === chosen ? 1 : 0.6}"/>`);
    if (end < top) parts.push(`<rect x="${x}" y="${end.toFixed(1)}" width="${w}" height="${(top - end).toFixed(1)}" fill="${bad ? "var(--red)" : "var(--blue-wash)"}"/>`);
  }
  parts.push(`<path class="mark" d="M50 ${one}H${width}"/><text x="46" y="${one}" dy=".32em" text-anchor="end">1 turn</text>`);
  parts.push(`<text x="50" y="${height - 4}">fastest pair</text><text x="${width}" y="${height - 4}" text-anchor="end">slowest</text>`);
  const bad = trained.filter((t, i) => unseenShare(TURN * t, TURN * reached[i]) > 0.0005).length;
  host.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="Turns of ${n} pairs; ${bad} reach angles never trained.">${parts.join("")}</svg>`;
}

const CELLS = 240, SHADES = 256;
const rgb = (name) => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
};

/** The colours of the heat map, as its pixels hold them: of distances within the window, beyond it, not seen, and none. */
function colours() {
  const packed = (colour) => new Uint32Array(new Uint8ClampedArray([...colour, 255]).buffer)[0];
  const near = rgb("--blue-wash"), far = rgb("--series-0");
  const shade = (k) => packed(near.map((x, c) => x + (far[c] - x) * Math.sqrt(k / SHADES)));
  return { shades: Array.from({ length: SHADES }, (_, k) => shade(k)), red: packed(rgb("--red")), unseen: packed(rgb("--grid")), paper: packed(rgb("--paper")) };
}
let palette = null;

/** Effective distances of queries (down) and keys (across): paler is nearer, red is beyond the window. */
function drawHeat(canvas, bands, window, length) {
  canvas.width = canvas.height = CELLS;
  palette ??= colours();
  const { shades, red, unseen, paper } = palette;
  const context = canvas.getContext("2d"), image = context.createImageData(CELLS, CELLS), data = new Uint32Array(image.data.buffer).fill(paper);
  for (let row = 0; row < CELLS; row++) {
    const m = Math.floor(((row + 0.5) / CELLS) * length);
    const edges = bands.map((band) => [band.begin(m), band.end(m), band.query(m), band.key]);
    for (let column = 0; column <= row; column++) {
      const n = Math.min(m, Math.floor(((column + 0.5) / CELLS) * length));
      const band = edges.find(([begin, end]) => n >= begin && n < end);
      const share = band ? (band[2] - band[3](n)) / window : NaN;
      data[row * CELLS + column] = Number.isNaN(share) ? unseen : share >= 1 ? red : shades[Math.floor(share * SHADES)];
    }
  }
  context.putImageData(image, 0, 0);
}
