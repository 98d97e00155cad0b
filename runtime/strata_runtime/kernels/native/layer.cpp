// A decoder layer that goes as Llama's does, for some tokens, in one call (kernels/native_layer.py): at few tokens what surrounds a layer's seven products takes
// as long as they do when each is a call of Python. It calls the library's own functions one after the other, so that every bit is that of those calls.
#include "calls.h"
#include "rowwise.h"

using namespace strata;

namespace {

enum class Kind : int64_t { dense = 0, planes = 1, planes_int8 = 2, channels = 3, planes_decoded = 4 };

// A linear. `weight`: what names it in a DenseCall, a PlanesCall or a ChannelCall, in their order.
struct Product {
  int64_t kind, columns;
  int64_t bias;  // bfloat16 [rows] where the call itself takes none, or 0
  int64_t weight[5 + 2 * kMostBits];

  int64_t rows() const { return static_cast<Kind>(kind) == Kind::dense ? weight[1] : weight[0]; }
};

// In the order of native_layer.py.
struct LayerCall {
  int64_t hidden, out;  // bfloat16 [tokens, width]
  // Of a step.
  int64_t tokens;
  int64_t memory;      // bfloat16 [tokens, as many columns as `work_columns` of native_layer.py says]
  int64_t cos, sin;    // bfloat16 [tokens, head_width]
  int64_t new_places;  // int64 [tokens]
  int64_t page_tokens, spans, span_count, pages, threads;
  // Of a layer.
  int64_t width, head_width, norm, attended_norm, query_norm, key_norm;  // bfloat16 [width], [head_width] or 0
  double epsilon;
  int64_t keys, values, key_scales, value_scales, places;
  double scale;
  int64_t window;
  Product query, key, value, output, gate, up, down;
};

#if STRATA_X86
int64_t address(const void* at) { return reinterpret_cast<int64_t>(at); }

// tokens [count, columns], contiguous -> out [count, rows]
void multiply(const Product& product, const uint16_t* tokens, int64_t count, uint16_t* out, int64_t threads) {
  const int64_t* w = product.weight;
  const int64_t rows = product.rows();
  if (static_cast<Kind>(product.kind) == Kind::dense) {
    const DenseCall call{address(tokens), count, product.columns, w[0], rows, w[2], w[3], w[4], address(out), rows, threads};
    strata_dense_linear(&call);
    return;
  }
  if (static_cast<Kind>(product.kind) == Kind::channels) {
    const ChannelCall call{address(tokens), count, product.columns, product.columns, static_cast<int64_t>(Type::bfloat16), address(out), rows, threads,
                           w[0],            w[1],  w[2],            w[3],            w[4],                                 w[5]};
    strata_channel_linear(&call);
    if (product.bias) rowwise().add(out, pointer<const uint16_t>(product.bias), 0, count, rows, out);
    return;
  }
  PlanesCall call{address(tokens), count, product.columns, product.columns, static_cast<int64_t>(Type::bfloat16), address(out), rows, threads,
                  rows,            w[1],  w[2],            w[3],            w[4],                                {},           {}};
  for (int place = 0; place < kMostBits; ++place) {
    call.planes[place] = w[5 + place];
    call.strides[place] = w[5 + kMostBits + place];
  }
  switch (static_cast<Kind>(product.kind)) {
    case Kind::planes:
      strata_planes_linear(&call);
      break;
    case Kind::planes_decoded:
      strata_planes_decoded_linear(&call);
      break;
    default:
      strata_planes_linear_int8(&call);
  }
  if (product.bias) rowwise().add(out, pointer<const uint16_t>(product.bias), 0, count, rows, out);
}

void normalize(const uint16_t* rows, int64_t count, int64_t width, int64_t weight, const LayerCall& call, uint16_t* out) {
  const NormCall norm{address(rows), count, width, width, weight, address(out), call.epsilon, call.threads};
  strata_rms_norm(&norm);
}

// Queries or keys of a token next to each other: [tokens, heads, head_width].
void place_in_order(const LayerCall& call, uint16_t* items, int64_t heads, int64_t norm) {
  const int64_t width = call.head_width;
  if (norm) normalize(items, call.tokens * heads, width, norm, call, items);
  const RotateCall rotate{address(items), heads, call.tokens, width, width, heads * width, call.cos, call.sin, width, call.threads};
  strata_rotate(&rotate);
}

// Of each token's keys or values [kv_heads, head_width] to its place. `unread`: as many, which are restored by the way.
void store(const LayerCall& call, const uint16_t* items, int64_t heads, int64_t held, int64_t scales, uint16_t* unread) {
  const int64_t width = call.head_width, *places = pointer<const int64_t>(call.new_places);
  if (scales) {
    const EntriesCall entries{address(items),   width, heads * width, static_cast<int64_t>(Type::bfloat16), heads,           call.tokens, width,
                              call.new_places, held,  scales,        call.places,                          address(unread)};
    return strata_round_entries(&entries);
  }
  for (int64_t token = 0; token < call.tokens; ++token)
    for (int64_t head = 0; head < heads; ++head)
      __builtin_memcpy(pointer<uint16_t>(held) + (head * call.places + places[token]) * width, items + (token * heads + head) * width,
                       static_cast<size_t>(width) * 2);
}

// What the tokens see -> out [tokens, heads, head_width].
void attend(const LayerCall& call, const uint16_t* query, int64_t heads, int64_t kv_heads, uint16_t* out) {
  AttentionCall attention{};
  attention.query = address(query);
  attention.query_head_stride = call.head_width;
  attention.query_token_stride = heads * call.head_width;
  attention.keys = call.keys;
  attention.values = call.values;
  attention.key_scales = call.key_scales;
  attention.value_scales = call.value_scales;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.width = call.head_width;
  attention.places = call.places;
  attention.page_tokens = call.page_tokens;
  attention.spans = call.spans;
  attention.span_count = call.span_count;
  attention.pages = call.pages;
  attention.scale = call.scale;
  attention.window = call.window;
  attention.out = address(out);
  attention.threads = call.threads;
  strata_attend(&attention);
}

void run(const LayerCall& call) {
  const int64_t tokens = call.tokens, width = call.width, threads = call.threads;
  const int64_t queries = call.query.rows(), keys = call.key.rows(), inner = call.gate.rows();
  const int64_t heads = queries / call.head_width, kv_heads = keys / call.head_width;
  uint16_t* at = pointer<uint16_t>(call.memory);
  const auto take = [&](int64_t columns) {
    uint16_t* taken = at;
    at += tokens * columns;
    return taken;
  };
  uint16_t *normed = take(width), *summed = take(width), *query = take(queries), *attended = take(queries), *key = take(keys), *value = take(keys),
           *unread = take(keys), *gate = take(inner), *up = take(inner);
  const uint16_t* hidden = pointer<const uint16_t>(call.hidden);
  uint16_t* out = pointer<uint16_t>(call.out);

  normalize(hidden, tokens, width, call.norm, call, normed);
  multiply(call.query, normed, tokens, query, threads);
  multiply(call.key, normed, tokens, key, threads);
  multiply(call.value, normed, tokens, value, threads);
  place_in_order(call, query, heads, call.query_norm);
  place_in_order(call, key, kv_heads, call.key_norm);
  store(call, key, kv_heads, call.keys, call.key_scales, unread);
  store(call, value, kv_heads, call.values, call.value_scales, unread);
  attend(call, query, heads, kv_heads, attended);
  multiply(call.output, attended, tokens, summed, threads);
  rowwise().add(hidden, summed, width, tokens, width, out);

  normalize(out, tokens, width, call.attended_norm, call, normed);
  multiply(call.gate, normed, tokens, gate, threads);
  multiply(call.up, normed, tokens, up, threads);
  const GateCall gated{address(gate), inner, address(up), inner, tokens, inner, address(gate), threads};
  strata_gate(&gated);
  multiply(call.down, gate, tokens, summed, threads);
  rowwise().add(out, summed, width, tokens, width, out);
}
#endif

}  // namespace

// Where the library multiplies bfloat16 (strata_dense_runs).
STRATA_API void strata_layer(const LayerCall* call) {
#if STRATA_X86
  run(*call);
#else
  (void)call;
#endif
}
