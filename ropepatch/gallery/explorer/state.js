// What is chosen, and what is drawn from it.
const $ = (id) => document.getElementById(id);
const COLOURS = [0, 1, 2, 3, 4, 5].map((k) => `var(--series-${k})`), DASHES = [null, "6 3", "2 3"];
const BASE = "var(--base)", GREATEST = 64, POINTS = 160;
const state = { model: DATA.chosen, length: 0, method: "yarn", given: {}, map: "rerope", mapGiven: {}, drawn: ["none", "linear", "ntk", "yarn"], pair: null, position: 1 };

const model = () => DATA.models.find(({ name }) => name === state.model);
const ropeOf = (entry) => (entry.rope ??= readRope(entry.config));
const tokens = (n) => Math.round(n).toLocaleString("en");
const option = (value, text) => `<option value="${escaped(value)}">${escaped(text)}</option>`;
const inWords = (n) => (n ? `<span class="bad">${n}</span>` : `<span class="good">none</span>`);

/** A colour and a dash for each method that is drawn. */
function look(name) {
  if (name === "none") return { colour: BASE, dash: "4 3", width: 2 };
  const place = state.drawn.filter((one) => one !== "none").indexOf(name);
  return { colour: COLOURS[place % 6], dash: DASHES[Math.floor(place / 6) % 3], width: name === state.method ? 3 : 1.8 };
}

/** N on a grid of L, at most 64 times L. */
function lengthAt(step, window) {
  const grid = Math.max(1, 2 ** Math.floor(Math.log2(window)) / 64);
  return Math.round((window * 2 ** (step / 10)) / grid) * grid;
}
const stepAt = (length, window) => clip(Math.round(10 * Math.log2(length / window)), 0, 60);

/** Every method at the chosen target, with what can be said of it; `error` where it does not apply. */
function resultOf(name, rope, before) {
  try {
    const [frequencies, a] = scaled(name, rope, state.length, name === state.method ? state.given : {});
    const unseen = Array.from(frequencies).filter((f, i) => unseenShare(rope.window * before[i], state.length * f) > 0.0005).length;
    return { name, frequencies, a, unseen };
  } catch (error) {
    return { name, error: error.message };
  }
}

const onScreen = new Set(["angles", "tiny", "methods-part", "remappings-part"]);

/** Draw all that is on the screen, and all else soon; everything at once where `whole` is true. */
function render(whole = false) {
  const entry = model(), rope = ropeOf(entry), before = inverseFrequencies(rope);
  if (resultOf(state.method, rope, before).error) state.method = rope.carried ? "ntk" : "yarn";
  const base = resultOf("none", rope, before), chosen = resultOf(state.method, rope, before);
  for (const place of document.querySelectorAll(".method-name")) place.textContent = state.method;
  for (const place of document.querySelectorAll(".map-name")) place.textContent = state.map;
  drawControls(rope);
  drawStory(entry, rope, before, chosen, base);
  drawTake(entry, rope, chosen);
  const parts = {
    angles: () => drawAngles(rope, before, chosen),
    tiny: () => drawTiny(rope),
    "methods-part": () => drawMethods(rope, before, Object.keys(METHODS).map((name) => resultOf(name, rope, before))),
    "remappings-part": () => drawMap(rope),
  };
  const now = Object.keys(parts).filter((id) => whole || onScreen.has(id));
  for (const id of now) parts[id]();
  clearTimeout(render.timer);
  render.timer = setTimeout(() => Object.keys(parts).filter((id) => !now.includes(id)).forEach((id) => parts[id]()), 150);
}
