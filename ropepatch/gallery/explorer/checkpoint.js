// The config.json of a scaled model, and the command that writes it.

/** The `rope_parameters` of the method where transformers has a type for it, as its `native` in Python gives. */
const NATIVE = {
  none: () => ({ rope_type: "default" }),
  linear: (rope, s) => ({ rope_type: "linear", factor: s }),
  ntk: (rope, s) => ({ rope_type: "default", rope_theta: ntkBase(rope, s) }),
  abf: (rope, s, p) => ({ rope_type: "default", rope_theta: p.rope_theta }),
  "ntk-by-parts": (rope, s, p) => ({
    rope_type: "llama3", factor: s, low_freq_factor: p.alpha, high_freq_factor: p.beta,
    original_max_position_embeddings: rope.window,
  }),
  llama3: (rope, s, p) => NATIVE["ntk-by-parts"](rope, s, p),
  yarn(rope, s, p) {
    if (p.ramp !== "index") return null;
    const usual = 0.1 * Math.log(s) + 1, a = p.attention_factor ?? usual;
    const other = usual !== 1 && Math.abs(a - usual) > 1e-9 * Math.max(a, usual);
    return {
      rope_type: "yarn", factor: s, original_max_position_embeddings: rope.window,
      beta_fast: p.beta_fast, beta_slow: p.beta_slow, attention_factor: a,
      ...(other ? { mscale: (a - 1) / (usual - 1), mscale_all_dim: 0 } : {}),
      ...(p.truncate ? {} : { truncate: false }),
    };
  },
  dynamic: (rope, s, p) => ({ rope_type: "dynamic", factor: p.form === "paper" ? 1 : s }),
};

/** Any static table as `longrope`, with both lists equal. */
function asLongrope(rope, frequencies, a, length) {
  const ratios = Array.from(frequencies, (f, i) => Math.min(rope.theta ** ((-2 * i) / rope.dim) / f, STOPPED));
  const s = length / rope.window, usual = s > 1 ? Math.sqrt(1 + Math.log(s) / Math.log(rope.window)) : 1;
  const derived = usual !== 1 && Math.abs(a - usual) <= 1e-9 * Math.max(a, usual);
  const lengths = derived ? [s, rope.window] : [1, length];
  return {
    rope_type: "longrope", factor: lengths[0], original_max_position_embeddings: lengths[1],
    short_factor: ratios, long_factor: ratios, attention_factor: a,
    ...(derived || a === 1 ? {} : { short_mscale: a, long_mscale: a }),
  };
}

/** The rope part of config.json for a model with this configuration. */
function configChanges(config, rope, name, length, given) {
  const part = config.text_config ?? config, s = length / rope.window, p = settled(name, rope, given);
  const before = part.rope_parameters ?? { rope_theta: rope.theta, ...(part.rope_scaling ?? {}) };
  const nested = before.full_attention, flat = nested ?? before;
  const drop = new Set([...SCALING_KEYS, ...(flat.rope_type === "proportional" ? ["partial_rotary_factor"] : [])]);
  const own = Object.fromEntries(Object.entries(flat).filter(([key]) => !drop.has(key)));
  if (part.partial_rotary_factor && !("partial_rotary_factor" in own)) own.partial_rotary_factor = part.partial_rotary_factor;
  const native = rope.carried ? null : NATIVE[name]?.(rope, s, p);
  const [frequencies, a] = scaled(name, rope, length, given);
  const parameters = { ...own, rope_theta: rope.theta, ...(native ?? asLongrope(rope, frequencies, a, length)) };
  const changes = {
    max_position_embeddings: name === "dynamic" ? rope.window : length,
    rope_parameters: nested ? { ...before, full_attention: parameters } : parameters,
  };
  if ("original_max_position_embeddings" in parameters)
    changes.original_max_position_embeddings = parameters.original_max_position_embeddings;
  return config.text_config ? { text_config: changes } : changes;
}

/** JSON with lists of numbers on one line. */
const jsonText = (value) =>
  JSON.stringify(value, null, 2).replace(/\[[^[\]{}]*\]/g, (list) => list.replace(/\s+/g, " "));

/** A length as the command line takes it. */
const shortLength = (tokens) => (tokens % 1024 ? String(tokens) : `${tokens / 1024}k`);

/** A word of a shell, quoted where it has to be. */
const word = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

function command(model, name, length, given) {
  const settings = Object.entries(given).map(([key, value]) => ` --set ${word(`${key}=${value}`)}`).join("");
  return `ropepatch extend ${word(model)} --to ${shortLength(length)} --method ${name}${settings}`;
}
