// Choices: the controls, the address, a dropped file.

function setGiven(which, name, value) {
  state[which] = { ...state[which] };
  if (value === undefined) delete state[which][name];
  else state[which][name] = value;
  update();
}

const methodParameters = () => drawParameters($("parameters"), METHODS[state.method], state.given, (name, value) => setGiven("given", name, value), false);
const mapParameters = () => drawParameters($("map-parameters"), REMAPPINGS[state.map], state.mapGiven, (name, value) => setGiven("mapGiven", name, value), true);

function chooseModel(name, length) {
  const entry = DATA.models.find((one) => one.name === name), rope = ropeOf(entry);
  const s = state.length ? state.length / ropeOf(model()).window : 4;
  state.model = name;
  state.pair = null;
  state.mapGiven = {};
  state.length = clip(length ?? lengthAt(stepAt(s * rope.window, rope.window), rope.window), rope.window, GREATEST * rope.window);
  update(true);
}

function chooseMethod(name) {
  state.method = name;
  state.given = {};
  methodParameters();
  update(true);
  drawStudy();
}

let waiting = 0;
/** Draw with the next frame, once; the address follows. */
function update(whole = false) {
  waiting ||= requestAnimationFrame(() => {
    waiting = 0;
    const begin = performance.now();
    render(whole);
    state.milliseconds = performance.now() - begin;
    clearTimeout(update.timer);
    update.timer = setTimeout(() => history.replaceState(null, "", `#${address()}`), 200);
  });
}

function address() {
  const { model: name, length, method, given, map, mapGiven } = state;
  const fields = new URLSearchParams({ model: name, to: length, method, map });
  for (const [key, value] of Object.entries(given)) fields.append("set", `${key}=${value}`);
  for (const [key, value] of Object.entries(mapGiven)) fields.append("map-set", `${key}=${value}`);
  return fields.toString();
}

function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const settings = (name, known) => Object.fromEntries(fields.getAll(name).map((pair) => pair.split("=")).filter(([key]) => key in known)
    .map(([key, text]) => [key, text === "true" || text === "false" ? text === "true" : Number.isNaN(Number(text)) ? text : Number(text)]));
  if (fields.get("method") in METHODS) state.method = fields.get("method");
  if (fields.get("map") in REMAPPINGS) state.map = fields.get("map");
  state.given = settings("set", METHODS[state.method].parameters);
  const name = DATA.models.some((one) => one.name === fields.get("model") && !one.refused) ? fields.get("model") : state.model;
  chooseModel(name, Number(fields.get("to")) || undefined);
  state.mapGiven = settings("map-set", REMAPPINGS[state.map].parameters);
  methodParameters();
  mapParameters();
}

async function takeFile(file) {
  try {
    const config = JSON.parse(await file.text()), entry = { name: "yours", title: `your ${file.name}`, model: "MODEL", config };
    entry.rope = readRope(config);
    DATA.models = [entry, ...DATA.models.filter(({ name }) => name !== "yours")];
    fillModels();
    $("problem").hidden = true;
    chooseModel("yours");
  } catch (error) {
    $("problem").hidden = false;
    $("problem").textContent = `${file.name}: ${error instanceof SyntaxError ? "no JSON" : error.message}.`;
  }
}

/** The models to choose from; those whose rope cannot be extended are named, and closed. */
function fillModels() {
  $("model").innerHTML = DATA.models.map((entry) => {
    try {
      ropeOf(entry);
      return option(entry.name, entry.title);
    } catch (error) {
      entry.refused = error.message;
      return `<option disabled title="${escaped(error.message)}">${escaped(entry.title)}: not supported</option>`;
    }
  }).join("");
}

function play() {
  const begin = performance.now(), from = state.position < 1 ? state.position : 0;
  play.on = !play.on;
  $("play").textContent = play.on ? "Stop" : "Play";
  const step = (now) => {
    if (!play.on) return;
    state.position = Math.min(1, from + (now - begin) / 8000);
    update();
    if (state.position < 1) return requestAnimationFrame(step);
    play.on = false;
    $("play").textContent = "Play";
  };
  requestAnimationFrame(step);
}

async function copy(text, words) {
  await navigator.clipboard.writeText(text);
  $("copied").textContent = words;
}

function wire() {
  const on = (id, kind, act) => $(id).addEventListener(kind, act);
  on("model", "change", () => chooseModel($("model").value));
  on("target", "input", () => {
    state.length = lengthAt(Number($("target").value), ropeOf(model()).window);
    update();
  });
  on("method", "change", () => chooseMethod($("method").value));
  on("file", "change", () => $("file").files[0] && takeFile($("file").files[0]));
  on("position", "input", () => ((state.position = Number($("position").value) / 1000), update()));
  on("pair", "input", () => ((state.pair = Number($("pair").value)), update()));
  on("play", "click", play);
  on("map", "change", () => (Object.assign(state, { map: $("map").value, mapGiven: {} }), mapParameters(), update()));
  on("study", "change", drawStudy);
  on("link", "click", () => copy(`${location.href.split("#")[0]}#${address()}`, "copied"));
  for (const button of document.querySelectorAll("[data-copy]")) button.onclick = () => copy($(button.dataset.copy).textContent, "copied");
  for (const id of ["live", "live-map", "prompt-depth", "prompt-length"]) on(id, "change", () => update());
  document.querySelector("#tiny details").addEventListener("toggle", () => redraw());
  addEventListener("hashchange", readAddress);
  addEventListener("dragover", (event) => (event.preventDefault(), document.body.classList.add("dropping")));
  addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files[0]) takeFile(event.dataTransfer.files[0]);
  });
  const fresh = () => ((palette = null), widths.clear(), update(true), drawStudy());
  const seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => onScreen[isIntersecting ? "add" : "delete"](target.id)));
  for (const id of onScreen) seen.observe($(id));
  addEventListener("beforeprint", () => render(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", fresh);
  addEventListener("resize", fresh);
}

function fill() {
  fillModels();
  $("method").innerHTML = Object.keys(METHODS).map((name) => option(name, name)).join("");
  $("map").innerHTML = Object.keys(REMAPPINGS).map((name) => option(name, name)).join("");
  $("study").innerHTML = DATA.measured.map((one, k) => option(k, `${one.model}, ${tokens(one.trained)} → ${tokens(one.target)} tokens, ${one.kind === "remappings" ? "position remappings" : "methods"}`)).join("");
  $("methods").tBodies[0].innerHTML = Object.entries(METHODS).map(([name, one]) =>
    `<tr><td><input type="checkbox" aria-label="draw ${name}"></td><th scope="row"><button type="button" class="name" title="${escaped(one.words)}">${name}</button><i class="swatch"></i></th><td>${escaped(one.formula)}</td><td></td><td class="number"></td><td></td><td>${escaped(one.saved_as)}</td></tr>`).join("");
  for (const [k, row] of [...$("methods").tBodies[0].rows].entries()) {
    const name = Object.keys(METHODS)[k];
    row.querySelector("input").onchange = ({ target }) => {
      state.drawn = target.checked ? [...state.drawn, name] : state.drawn.filter((one) => one !== name);
      update();
    };
    row.querySelector("button").onclick = () => chooseMethod(name);
  }
  $("tiny").hidden = !TINY;
  if (TINY) {
    const unique = (key) => [...new Set(TINY.prompts.map((one) => one[key]))];
    $("prompt-length").innerHTML = unique("length").map((n) => option(n, `${tokens(n)} tokens`)).join("");
    $("prompt-depth").innerHTML = unique("depth").map((depth) => option(depth, `${percent(depth)} of the way in`)).join("");
    $("prompt-length").value = "512";
    $("prompt-depth").value = "0.1";
  }
}

fill();
wire();
readAddress();
const first = DATA.measured.findIndex((one) => one.target === 4 * one.trained && one.kind === "methods");
$("study").value = Math.max(0, first);
drawStudy();
window.ropepatch = { state, DATA, FORMULAS, PLACES, scaled, settled, readRope, fitted, checkMap, readAt, similarity, configChanges, command, tinyWay, taleReading, promptReading, verdict, want, READINGS, TINY, render };
