// tiny's readings: asked of a worker, kept, and drawn.
const TINY = JSON.parse(document.querySelector("#reading").textContent);
const READINGS = new Map(); // by what was read and how
const KEPT = 300;
let worker = null, running = null, wanted = [], asked = 0, redraw = () => {};

function startWorker() {
  const text = document.querySelector("#worker").textContent;
  worker = new Worker(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
  worker.onmessage = ({ data }) => {
    if (!running || data.id !== running.id) return;
    if (data.share !== undefined) return redraw(data.share);
    if (READINGS.size >= KEPT) READINGS.delete(READINGS.keys().next().value);
    READINGS.set(running.key, data);
    running = null;
    next();
    redraw(wanted.length ? 0 : 1);
  };
  worker.postMessage({ tiny: TINY });
}

/** Begin the first reading that is wanted and not there; one that is no longer wanted stops. */
function next() {
  wanted = wanted.filter(({ key }) => !READINGS.has(key));
  if (running && wanted.some(({ key }) => key === running.key)) return;
  running = wanted[0] ? { ...wanted[0], id: ++asked } : null;
  if (!worker) startWorker();
  worker.postMessage(running ? { id: running.id, ids: running.ids, rope: running.rope, first: running.first } : { id: ++asked });
}

/** What tiny is to read, the most wanted first. */
function want(readings) {
  wanted = readings;
  next();
}

const tinyRope = () => DATA.models.find(({ name }) => name === "tiny").rope;

/** How tiny reads with a method, or by a remapping, at s times its window; throws where that cannot be. */
function tinyWay(s, { method = "none", given = {}, map = null, mapGiven = {} } = {}) {
  const rope = tinyRope(), length = Math.max(rope.window, Math.round(s * rope.window));
  const [inverse, factor] = scaled(method, rope, length, given);
  if (!map) return { inverse, factor, bands: WHOLE, name: `${method} ${JSON.stringify(given)} ${Array.from(inverse)}` };
  const p = fitted(map, rope.window, length, mapGiven);
  checkMap(map, p, rope.window, length);
  return { inverse, factor: p.attention_factor ?? 1, bands: PLACES[map].bands(p), name: `${map} ${JSON.stringify(p)}` };
}

/** A reading of tokens, of which losses are needed from row `first` on. */
function readingOf(ids, way, first = 0) {
  const rope = { inverse: way.inverse, factor: way.factor, bands: tabulated(way.bands, ids.length) };
  return { key: `${way.name} ${ids.length} ${first} ${ids[ids.length >> 1]}`, ids, rope, first };
}

const taleReading = (way, tokens) => readingOf(TINY.tale.slice(0, tokens), way);
const promptReading = (way, prompt) => readingOf(prompt.ids, way, prompt.ids.length - 1 - prompt.answer);

/** Whether a prompt was answered, and the words said. */
function verdict(prompt, reading) {
  const said = reading.likely, key = prompt.ids.slice(-prompt.answer);
  return { found: said.every((token, k) => token === key[k]), words: said.map((token) => TINY.words[token]).join("").trim() };
}

const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;

/** Mean losses over stretches of tokens: [position in the middle, nats]. */
function byStretch(losses) {
  const points = [];
  for (let t = 0; t < losses.length; t += TINY.stretch) {
    const part = losses.slice(Math.max(0, t - 1), t + TINY.stretch - 1); // losses[k] is of token k + 1
    points.push([t + TINY.stretch / 2, mean(part)]);
  }
  return points;
}

/** The tale as text, redder where the reader was more surprised. */
function taleText(losses) {
  const words = TINY.tale.slice(1, losses.length + 1).map((token, t) => {
    const share = Math.round(Math.min(1, losses[t] / 6) * 60);
    const end = t + 2 === tinyRope().window ? "<hr>" : "";
    return `<span style="background:color-mix(in srgb, var(--red) ${share}%, transparent)">${escaped(TINY.words[token])}</span>${end}`;
  });
  return words.join("");
}
