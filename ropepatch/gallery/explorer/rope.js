// From a rope to its frequencies, as ropepatch/scaling computes them, step by step in float32.
// A rope: dim (d), theta (b), window (L), carried (frequencies of an earlier scaling, or null), factor (its a).
const f32 = Math.fround, TURN = 2 * Math.PI, STOPPED = 1e30;

const exponents = (rope) => Float32Array.from({ length: rope.dim / 2 }, (_, i) => f32((2 * i) / rope.dim));
const powers = (base, rope) => exponents(rope).map((e) => base ** e);
const inverse = (numbers) => numbers.map((p) => f32(1 / p));
const inverseFrequencies = (rope) => (rope.carried ? Float32Array.from(rope.carried) : inverse(powers(rope.theta, rope)));
const wavelengths = (frequencies) => Array.from(frequencies, (f) => TURN / f);
const clip = (x, low, high) => Math.min(Math.max(x, low), high);

function rebased(rope, base) {
  if (!rope.carried) return inverse(powers(base, rope));
  const ratio = base / rope.theta, shares = exponents(rope);
  return inverseFrequencies(rope).map((f, i) => f * f32(ratio ** -shares[i]));
}

function ntkBase(rope, s) {
  if (rope.dim < 4) throw new Error("the rotary dimension must be at least 4");
  return rope.theta * s ** (rope.dim / (rope.dim - 2));
}

/** theta / s at up to `low` turns within L, theta from `high` on, linear between. */
function blended(rope, s, low, high) {
  return inverseFrequencies(rope).map((f) => {
    const wave = f32(f32(TURN) / f), keep = f32(f32(f32(rope.window / wave) - low) / (high - low));
    if (wave < rope.window / high) return f;
    if (wave > rope.window / low) return f / s;
    return f32(f32(f32(1 - keep) * f) / s) + f32(keep * f);
  });
}

/** 0 up to the pair that turns `fast` times within L, 1 from the one that turns `slow` times. */
function indexRamp(rope, { beta_fast, beta_slow, truncate }) {
  const pair = (turns) => (rope.dim * Math.log(rope.window / (turns * TURN))) / (2 * Math.log(rope.theta));
  let low = pair(beta_fast), high = pair(beta_slow);
  if (truncate) [low, high] = [Math.floor(low), Math.ceil(high)];
  [low, high] = [Math.max(low, 0), Math.min(high, rope.dim - 1)];
  if (low === high) high += 0.001;
  return exponents(rope).map((_, i) => clip(f32(f32(i - low) / f32(high - low)), 0, 1));
}

function yarn(rope, s, p) {
  const a = rope.factor * (p.attention_factor ?? 0.1 * Math.log(s) + 1);
  if (p.ramp === "rotations") return [blended(rope, s, p.beta_slow, p.beta_fast), a];
  refuseScaled(rope);
  const waves = powers(rope.theta, rope), ramp = indexRamp(rope, p);
  if (p.ramp === "wavelength") return [waves.map((w, i) => 1 / f32(w * f32(f32(f32(ramp[i] * s) + 1) - ramp[i]))), a];
  return [
    waves.map((w, i) => {
      const keep = f32(1 - ramp[i]);
      return f32(f32(1 / f32(f32(s) * w)) * f32(1 - keep)) + f32(f32(1 / w) * keep);
    }),
    a,
  ];
}

function refuseScaled(rope) {
  if (rope.carried) throw new Error("its formula needs rope_theta, but this model already has RoPE scaling");
}

const stretched = (rope, length) => Math.max(1, length / rope.window);

function giraffe(rope, s, p) {
  const f = inverseFrequencies(rope);
  return p.interpolate ? f.map((x) => x / s) : f;
}

/** Of every method: from a rope, s, its parameters and N to frequencies and, where it has one, its own a. */
const FORMULAS = {
  none: (rope) => inverseFrequencies(rope),
  linear: (rope, s) => inverseFrequencies(rope).map((f) => f / s),
  ntk: (rope, s) => rebased(rope, ntkBase(rope, s)),
  "ntk-by-parts": (rope, s, p) => blended(rope, s, p.alpha, p.beta),
  llama3: (rope, s, p) => blended(rope, s, p.alpha, p.beta),
  yarn: (rope, s, p) => yarn(rope, s, p),
  abf(rope, s, p) {
    refuseScaled(rope);
    return [rebased(rope, p.rope_theta), 1];
  },
  "ntk-fixed": (rope, s) => inverseFrequencies(rope).map((f, i) => f * s ** ((-2 * (i + 1)) / rope.dim)),
  "ntk-mixed": (rope, s) =>
    inverseFrequencies(rope).map((f, i) => f * Math.exp(-Math.log(s) * ((2 * (i + 1)) / rope.dim) ** 0.75)),
  "giraffe-power"(rope, s, p) {
    const shares = exponents(rope);
    return giraffe(rope, s, p).map((f, i) => f * (1 - shares[i]) ** p.power);
  },
  "giraffe-truncated"(rope, s, p) {
    const c = TURN / (p.cutoff || rope.window);
    return giraffe(rope, s, p).map((f) => (f >= c ? f : f >= c / 8 ? c / 16 : 0));
  },
  "p-rope"(rope, s, p) {
    const kept = Math.floor(Math.floor((p.partial * rope.dim) / 2));
    return inverseFrequencies(rope).map((f, i) => (i < kept ? f : 0));
  },
  resonance(rope, s, p, length) {
    const [inner, a] = scaled(p.over, rope, length, {}, s);
    return [inner.map((f) => TURN / roundHalfToEven(TURN / f)), a];
  },
  cope(rope, s, p, length) {
    const [inner, a] = scaled(p.over, rope, length, p.rope_theta ? { rope_theta: p.rope_theta } : {}, s);
    const n = Math.min(p.pairs, inner.length), first = inner.length - n;
    const fade = (i) => (p.hard || i === n - 1 ? 0 : (1 + Math.cos((Math.PI * i) / (n - 1))) / 2);
    return [inner.map((f, i) => (i < first ? f : f * fade(i - first))), a];
  },
  dynamic(rope, s, p, length) {
    refuseScaled(rope);
    const f = p.form === "paper" ? 1 : s;
    return rebased(rope, ntkBase(rope, f * stretched(rope, length) - (f - 1)));
  },
};

const roundHalfToEven = (x) => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

/** The parameters of a method: its defaults, those for a rope that is scaled already, and the given ones. */
const settled = (name, rope, given) => ({
  ...METHODS[name].parameters,
  ...(rope.carried ? METHODS[name].composing : {}),
  ...given,
});

/** Frequencies [d/2], radians per token, and the attention factor of a method that reaches for `length` tokens. */
function scaled(name, rope, length, given = {}, s = length / rope.window) {
  const found = FORMULAS[name](rope, s, settled(name, rope, given), length);
  return Array.isArray(found) ? found : [found, rope.factor];
}

/** The mean cosine of all pairs around a distance: less and less of distances up to `width` away. */
function similarity(frequencies, factor, distance, width) {
  let sum = 0;
  for (const f of frequencies) {
    const half = (f * width) / 2;
    sum += Math.cos(f * distance) * (half > 1e-9 ? (Math.sin(half) / half) ** 2 : 1);
  }
  return (factor * factor * sum) / frequencies.length;
}

const DEFAULTS = {  // of transformers, for what a published config.json leaves out
  gemma3_text: { num_attention_heads: 8, head_dim: 256, max_position_embeddings: 131072, rope_theta: 1e6 },
};

/** The rope that a config.json describes; of several parts, that of the language model. */
function readRope(config) {
  const stated = config.text_config ?? config, part = { ...DEFAULTS[stated.model_type], ...stated };
  const numbers = part.rope_parameters?.full_attention ?? part.rope_parameters ?? {};
  const given = { ...numbers, ...(part.rope_scaling ?? {}) };
  const theta = part.rope_theta ?? part.rotary_emb_base ?? given.rope_theta ?? 10000;
  const heads = part.num_attention_heads ?? part.n_head, width = part.hidden_size ?? part.n_embd;
  const head = part.qk_rope_head_dim ?? part.head_dim ?? width / heads;
  const share = given.partial_rotary_factor ?? part.partial_rotary_factor ?? part.rotary_pct ?? 1;
  const kind = given.rope_type ?? given.type ?? "default";
  const dim = kind === "proportional" ? head : 2 * Math.floor(Math.floor(head * share) / 2);
  const window = part.max_position_embeddings ?? part.n_positions ?? 2048;
  if (!(dim >= 2) || !(theta > 1) || !(window >= 2))
    throw new Error("this config.json has no RoPE: hidden_size, num_attention_heads, max_position_embeddings are needed");
  const rope = { dim, theta, window, carried: null, factor: 1 };
  if (kind === "default" || kind === "mrope") return rope;
  return { ...rope, ...CARRIED[kind]?.(rope, given, part) ?? refuse(kind) };
}

function refuse(kind) {
  throw new Error(`unknown RoPE type ${kind}: use the checkpoint that it was made from`);
}

/** Of a rope type in config.json: the frequencies and the factor that such a model carries, and its window. */
const CARRIED = {
  dynamic: (rope, p) => ({ theta: rope.theta * (p.alpha ?? 1) ** (rope.dim / (rope.dim - 2)) }), // within the window
  linear: (rope, p) => ({ carried: inverseFrequencies(rope).map((f) => f / p.factor) }),
  llama3(rope, p) {
    const before = { ...rope, window: p.original_max_position_embeddings };
    return { carried: blended(before, p.factor, p.low_freq_factor, p.high_freq_factor) };
  },
  yarn(rope, p) {
    const before = { ...rope, window: p.original_max_position_embeddings };
    const k = (scale) => 0.1 * scale * Math.log(p.factor) + 1;
    const own = p.mscale && p.mscale_all_dim ? k(p.mscale) / k(p.mscale_all_dim) : undefined;
    const settings = { beta_fast: 32, beta_slow: 1, truncate: true, ramp: "index", ...p };
    const [carried, factor] = yarn(before, p.factor, { ...settings, attention_factor: p.attention_factor ?? own });
    return { carried, factor, window: Math.max(rope.window, Math.trunc(p.factor * before.window)) };
  },
  longrope(rope, p, part) {
    const trained = part.original_max_position_embeddings ?? p.original_max_position_embeddings ?? rope.window;
    const s = p.factor ?? rope.window / trained;
    const carried = powers(rope.theta, rope).map((w, i) => 1 / f32(f32(p.long_factor[i]) * w));
    const usual = s > 1 ? Math.sqrt(1 + Math.log(s) / Math.log(trained)) : 1;
    return { carried, factor: p.attention_factor ?? usual, window: Math.max(rope.window, Math.trunc(s * trained)) };
  },
  proportional(rope, p) {
    const turning = Math.floor(((p.partial_rotary_factor ?? 1) * rope.dim) / 2);
    return { carried: inverseFrequencies(rope).map((f, i) => (i < turning ? f / (p.factor ?? 1) : 0)) };
  },
};
