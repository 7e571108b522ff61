// Requests to the server this page came from.

const KEY = "steptron-metrics-token";
const CACHE_BYTES = 96 << 20;

export class ApiError extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

let askForToken = null;
let asking = null;

/** Sets what asks a person for a token: a function (reason) → promise of the token. */
export function onTokenNeeded(ask) {
  askForToken = ask;
}

export function forgetToken() {
  sessionStorage.removeItem(KEY);
}

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

function headers(extra) {
  const token = sessionStorage.getItem(KEY);
  return token === null ? extra : { ...extra, Authorization: `Bearer ${token}` };
}

/** Answers that carry an ETag, the least recently used first. */
const cache = new Map();
let cached = 0;

function remember(url, etag, value, bytes) {
  forget(url);
  cache.set(url, { etag, value, bytes });
  cached += bytes;
  for (const oldest of cache.keys()) {
    if (cached <= CACHE_BYTES) break;
    forget(oldest);
  }
}

function forget(url) {
  const entry = cache.get(url);
  if (entry === undefined) return;
  cache.delete(url);
  cached -= entry.bytes;
}

async function request(url, decode, { signal, method = "GET" } = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEY);
    const known = method === "GET" ? cache.get(url) : undefined;
    const answer = await fetch(url, {
      method, signal, cache: "no-store", credentials: "omit",
      headers: headers(known ? { "If-None-Match": known.etag } : {}),
    });
    if (answer.status === 304 && known) return known.value;
    if (answer.status === 401 && askForToken !== null) {
      const { reason } = await answer.json();
      if (sessionStorage.getItem(KEY) === sent) {
        asking ??= askForToken(sent === null ? "" : reason).finally(() => { asking = null; });
        sessionStorage.setItem(KEY, await asking);
      }
      continue;
    }
    if (!answer.ok) {
      let reason = `the server answered ${answer.status}`;
      try { ({ reason } = await answer.json()); } catch { /* not in JSON: from something in between */ }
      throw new ApiError(answer.status, reason);
    }
    const content = await answer.arrayBuffer();
    const value = decode(content);
    const etag = answer.headers.get("ETag");
    if (method === "GET" && etag) remember(url, etag, value, content.byteLength + 1000);
    return value;
  }
}

/** Parameters as a query; arrays become a parameter for each entry. */
function query(parameters) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined) search.append(name, one);
    }
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

const text = new TextDecoder();

export function getJson(path, parameters = {}, options = {}) {
  return request(`/api/v1/${path}${query(parameters)}`, (content) => JSON.parse(text.decode(content)), options);
}

export function remove(path, parameters = {}) {
  return request(`/api/v1/${path}${query(parameters)}`, () => null, { method: "DELETE" });
}

/** Blocks in the binary form: first, last, values, low and high become typed arrays; rows and width are added. */
export function getBlocks(path, parameters, options = {}) {
  return request(`/api/v1/${path}${query({ ...parameters, form: "binary" })}`, decodeBlocks, options);
}

export function decodeBlocks(content) {
  if (text.decode(new Uint8Array(content, 0, 4)) !== "STP1") throw new Error("the answer is not in the form STP1");
  const length = new DataView(content).getUint32(4, true);
  const { blocks } = JSON.parse(text.decode(new Uint8Array(content, 8, length)));
  const kinds = { float32: Float32Array, float64: Float64Array };
  return blocks.map((block) => {
    const decoded = { ...block, rows: block.first.shape[0], width: block.columns.length };
    for (const name of ["first", "last", "values", "low", "high"]) {
      if (block[name] === undefined) continue;
      const { offset, shape, type } = block[name];
      decoded[name] = new kinds[type](content, 8 + length + offset, shape.reduce((a, b) => a * b, 1));
    }
    return decoded;
  });
}

/** A column of a block's planes, for a line. */
export function column(block, index) {
  const pick = (plane) => {
    if (plane === undefined) return undefined;
    const picked = new Float32Array(block.rows);
    for (let row = 0; row < block.rows; row += 1) picked[row] = plane[row * block.width + index];
    return picked;
  };
  return {
    first: block.first, last: block.last,
    values: pick(block.values ?? block.high), low: pick(block.low), high: pick(block.high),
  };
}
