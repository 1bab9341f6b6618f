// tiny, a LLaMA of four layers, reads tokens here, in a thread of its own.
"use strict";

let shape, weights, current = 0;

/** The weights as float32, from int8 with one scale per row. */
function unpacked({ layout, weights: text }) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const matrices = layout.filter(([, , columns]) => columns), vectors = layout.filter(([, , columns]) => !columns);
  const count = layout.reduce((sum, [, rows]) => sum + rows, 0);
  const numbers = new Float32Array(bytes.buffer, 0, count), values = new Int8Array(bytes.buffer, 4 * count);
  const parts = {};
  let at = 0, from = 0;
  for (const [name, rows, columns] of matrices) {
    const matrix = (parts[name] = new Float32Array(rows * columns));
    for (let row = 0, k = 0; row < rows; row++, at++)
      for (let column = 0; column < columns; column++, k++) matrix[k] = values[from + k] * numbers[at];
    from += rows * columns;
  }
  for (const [name, rows] of vectors) parts[name] = numbers.slice(at, (at += rows));
  return parts;
}

/** y [T, O] = x [T, I] times W [O, I] transposed, from row `first` on; four rows and two columns at a time. */
function multiply(x, W, y, rows, I, O, first = 0) {
  let t = first;
  for (; t + 4 <= rows; t += 4) {
    const a = t * I, b = a + I, c = b + I, d = c + I;
    for (let o = 0; o < O; o += 2) {
      const u = o * I, v = u + I;
      let p0 = 0, p1 = 0, p2 = 0, p3 = 0, q0 = 0, q1 = 0, q2 = 0, q3 = 0;
      for (let i = 0; i < I; i++) {
        const m = W[u + i], n = W[v + i], x0 = x[a + i], x1 = x[b + i], x2 = x[c + i], x3 = x[d + i];
        p0 += x0 * m; p1 += x1 * m; p2 += x2 * m; p3 += x3 * m;
        q0 += x0 * n; q1 += x1 * n; q2 += x2 * n; q3 += x3 * n;
      }
      const k = t * O + o;
      y[k] = p0; y[k + 1] = q0; y[k + O] = p1; y[k + O + 1] = q1;
      y[k + 2 * O] = p2; y[k + 2 * O + 1] = q2; y[k + 3 * O] = p3; y[k + 3 * O + 1] = q3;
    }
  }
  for (; t < rows; t++)
    for (let o = 0; o < O; o++) {
      let sum = 0;
      for (let i = 0, a = t * I, u = o * I; i < I; i++) sum += x[a + i] * W[u + i];
      y[t * O + o] = sum;
    }
}

/** Rows of x [T, H] over their root mean square, times a weight. */
function normed(x, weight, rows, H, first = 0) {
  const y = new Float32Array(rows * H);
  for (let t = first; t < rows; t++) {
    let sum = 0;
    for (let i = 0, a = t * H; i < H; i++) sum += x[a + i] * x[a + i];
    const scale = 1 / Math.sqrt(sum / H + shape.rms_norm_eps);
    for (let i = 0, a = t * H; i < H; i++) y[a + i] = x[a + i] * scale * weight[i];
  }
  return y;
}

/** x [T, heads * D] turned at places: [heads, T, D], each head in one piece. */
function turned(x, places, inverse, factor, rows, heads, D) {
  const y = new Float32Array(rows * heads * D), half = D / 2;
  for (let t = 0; t < rows; t++)
    for (let i = 0; i < half; i++) {
      const angle = places[t] * inverse[i], cos = Math.cos(angle) * factor, sin = Math.sin(angle) * factor;
      for (let h = 0; h < heads; h++) {
        const from = (t * heads + h) * D + i, to = (h * rows + t) * D + i;
        y[to] = x[from] * cos - x[from + half] * sin;
        y[to + half] = x[from + half] * cos + x[from] * sin;
      }
    }
  return y;
}

/** Causal attention of query head h from row `first` on, into out [T, heads * D]. */
function attend(bands, v, out, scores, h, rows, heads, group, D, first) {
  const kv = Math.floor(h / group) * rows * D, scale = 1 / Math.sqrt(D);
  for (let m = first; m < rows; m++) {
    let most = -Infinity;
    for (const { q, k, begin, end } of bands) {
      const a = (h * rows + m) * D;
      for (let n = begin[m]; n < end[m]; n++) {
        let sum = 0;
        for (let i = 0, b = kv + n * D; i < D; i += 2) sum += q[a + i] * k[b + i] + q[a + i + 1] * k[b + i + 1];
        if ((scores[n] = sum * scale) > most) most = scores[n];
      }
    }
    const o = (m * heads + h) * D;
    let total = 0;
    for (const { begin, end } of bands)
      for (let n = begin[m]; n < end[m]; n++) {
        const weight = Math.exp(scores[n] - most), b = kv + n * D;
        total += weight;
        for (let i = 0; i < D; i++) out[o + i] += weight * v[b + i];
      }
    for (let i = 0; i < D; i++) out[o + i] /= total;
  }
}

const { port1, port2 } = new MessageChannel();
/** Lets messages in; throws where another reading was asked for since. */
function pause(id) {
  return new Promise((resume, stop) => {
    port1.onmessage = () => (id === current ? resume() : stop(new Error("stopped")));
    port2.postMessage(0);
  });
}

/** The hidden states [T, H] of tokens; of the last layer only from row `first` on. */
async function hidden(id, ids, rope, first, step) {
  const { hidden_size: H, intermediate_size: F, num_hidden_layers: layers, head_dim: D } = shape;
  const { num_attention_heads: heads, num_key_value_heads: few } = shape;
  const rows = ids.length, x = new Float32Array(rows * H), embed = weights["model.embed_tokens.weight"];
  ids.forEach((token, t) => x.set(embed.subarray(token * H, (token + 1) * H), t * H));
  const q = new Float32Array(rows * heads * D), k = new Float32Array(rows * few * D), v = new Float32Array(rows * few * D);
  const still = new Float32Array(rows), scores = new Float32Array(rows), part = new Float32Array(rows * H);
  const gate = new Float32Array(rows * F), up = new Float32Array(rows * F);
  for (let layer = 0; layer < layers; layer++) {
    const of = (name) => weights[`model.layers.${layer}.${name}.weight`], start = layer === layers - 1 ? first : 0;
    const y = normed(x, of("input_layernorm"), rows, H);
    multiply(y, of("self_attn.q_proj"), q, rows, H, heads * D, start);
    multiply(y, of("self_attn.k_proj"), k, rows, H, few * D);
    multiply(y, of("self_attn.v_proj"), v, rows, H, few * D);
    const bands = rope.bands.map(({ begin, end, query, key }) => ({
      begin, end,
      q: turned(q, query, rope.inverse, rope.factor, rows, heads, D),
      k: turned(k, key, rope.inverse, rope.factor, rows, few, D),
    }));
    const values = turned(v, still, rope.inverse, 1, rows, few, D), out = new Float32Array(rows * heads * D);
    for (let h = 0; h < heads; h++) {
      attend(bands, values, out, scores, h, rows, heads, heads / few, D, start);
      await pause(id);
    }
    multiply(out, of("self_attn.o_proj"), part, rows, heads * D, H, start);
    for (let i = start * H; i < x.length; i++) x[i] += part[i];
    const z = normed(x, of("post_attention_layernorm"), rows, H, start);
    multiply(z, of("mlp.gate_proj"), gate, rows, H, F, start);
    await pause(id);
    multiply(z, of("mlp.up_proj"), up, rows, H, F, start);
    for (let i = start * F; i < gate.length; i++) gate[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
    multiply(gate, of("mlp.down_proj"), part, rows, F, H, start);
    for (let i = start * H; i < x.length; i++) x[i] += part[i];
    step((layer + 1) / (layers + 1));
    await pause(id);
  }
  return normed(x, weights["model.norm.weight"], rows, H, first);
}

/** From row `first` on: the loss of each next token in nats, and the token that is the most probable. */
async function read(id, ids, rope, first, step) {
  const H = shape.hidden_size, head = weights["lm_head.weight"] ?? weights["model.embed_tokens.weight"];
  const V = head.length / H, x = await hidden(id, ids, rope, first, step), logits = new Float32Array(ids.length * V);
  multiply(x, head, logits, ids.length - 1, H, V, first);
  const losses = [], likely = [];
  for (let t = first; t + 1 < ids.length; t++) {
    const row = logits.subarray(t * V, (t + 1) * V);
    let best = 0, sum = 0;
    for (let w = 1; w < V; w++) if (row[w] > row[best]) best = w;
    for (let w = 0; w < V; w++) sum += Math.exp(row[w] - row[best]);
    losses.push(Math.log(sum) + row[best] - row[ids[t + 1]]);
    likely.push(best);
  }
  return { losses, likely };
}

onmessage = async ({ data }) => {
  if (data.tiny) {
    shape = data.tiny.shape;
    weights = unpacked(data.tiny);
    return postMessage({ ready: true });
  }
  current = data.id;
  if (!data.ids) return;
  const begin = performance.now(), step = (share) => postMessage({ id: data.id, share });
  try {
    const found = await read(data.id, data.ids, data.rope, data.first ?? 0, step);
    postMessage({ id: data.id, ...found, milliseconds: performance.now() - begin });
  } catch (error) {
    if (error.message !== "stopped") throw error;
  }
};
