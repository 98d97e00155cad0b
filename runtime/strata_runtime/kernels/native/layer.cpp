// Decoder layers that go as Llama's do, one behind the other, for some tokens, in one call (kernels/native_layer.py): at few tokens what surrounds a layer's
// seven products takes as long as they do when each is a call of Python. It calls the library's own functions one after the other, so that every bit is that of
// those calls.
#include <algorithm>

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
struct Step {
  int64_t tokens;
  int64_t memory;      // bfloat16 [tokens, as many columns as `work_columns` of native_layer.py says]
  int64_t cos, sin;    // bfloat16 [tokens, head_width]
  int64_t new_places;  // int64 [tokens]
  int64_t page_tokens, spans, span_count, pages, threads;
};

struct Layer {
  int64_t width, head_width, norm, attended_norm, query_norm, key_norm;  // bfloat16 [width], [head_width] or 0
  double epsilon;
  int64_t keys, values, key_scales, value_scales, places;
  double scale;
  int64_t window;
  Product query, key, value, output, gate, up, down;
};

// Ranks that share the layers, as they meet (MeetCall); none: `segment` is 0.
struct Ranks {
  int64_t segment, rank, ranks, buffer_bytes;
  int64_t last_meeting;  // int64: its number
  int64_t patience_nanoseconds;
};

// Behind it `count` layers.
struct LayersCall {
  int64_t hidden, out;  // bfloat16 [rows, width]
  int64_t begun;        // int64: counts the layers that are begun, for whoever watches from another thread
  int64_t count;
  int64_t rows;  // tokens or more: ranks that go module by module meet as often as so many take
  Ranks ranks;
  Step step;

  const Layer* layers() const { return reinterpret_cast<const Layer*>(this + 1); }
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

void normalize(const uint16_t* rows, int64_t count, int64_t width, int64_t weight, double epsilon, int64_t threads, uint16_t* out) {
  const NormCall norm{address(rows), count, width, width, weight, address(out), epsilon, threads};
  strata_rms_norm(&norm);
}

// Queries or keys of a token next to each other: [tokens, heads, head_width].
void place_in_order(const Step& step, const Layer& layer, uint16_t* items, int64_t heads, int64_t norm) {
  const int64_t width = layer.head_width;
  if (norm) normalize(items, step.tokens * heads, width, norm, layer.epsilon, step.threads, items);
  const RotateCall rotate{address(items), heads, step.tokens, width, width, heads * width, step.cos, step.sin, width, step.threads};
  strata_rotate(&rotate);
}

// Of each token's keys or values [kv_heads, head_width] to its place. `unread`: as many, which are restored by the way.
void store(const Step& step, const Layer& layer, const uint16_t* items, int64_t heads, int64_t held, int64_t scales, uint16_t* unread) {
  const int64_t width = layer.head_width, *places = pointer<const int64_t>(step.new_places);
  if (scales) {
    const EntriesCall entries{address(items),   width, heads * width, static_cast<int64_t>(Type::bfloat16), heads,           step.tokens, width,
                              step.new_places, held,  scales,        layer.places,                         address(unread)};
    return strata_round_entries(&entries);
  }
  for (int64_t token = 0; token < step.tokens; ++token)
    for (int64_t head = 0; head < heads; ++head)
      __builtin_memcpy(pointer<uint16_t>(held) + (head * layer.places + places[token]) * width, items + (token * heads + head) * width,
                       static_cast<size_t>(width) * 2);
}

// What the tokens see -> out [tokens, heads, head_width].
void attend(const Step& step, const Layer& layer, const uint16_t* query, int64_t heads, int64_t kv_heads, uint16_t* out) {
  AttentionCall attention{};
  attention.query = address(query);
  attention.query_head_stride = layer.head_width;
  attention.query_token_stride = heads * layer.head_width;
  attention.keys = layer.keys;
  attention.values = layer.values;
  attention.key_scales = layer.key_scales;
  attention.value_scales = layer.value_scales;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.width = layer.head_width;
  attention.places = layer.places;
  attention.page_tokens = step.page_tokens;
  attention.spans = step.spans;
  attention.span_count = step.span_count;
  attention.pages = step.pages;
  attention.scale = layer.scale;
  attention.window = layer.window;
  attention.out = address(out);
  attention.threads = step.threads;
  strata_attend(&attention);
}

// Replaced by the sums of all ranks, [tokens, width]. As `strata_ranks_sum`.
int64_t sum_over_ranks(const LayersCall& call, uint16_t* items, int64_t width) {
  const Ranks& ranks = call.ranks;
  if (!ranks.segment) return 0;
  const int64_t there = call.step.tokens * width, piece = ranks.buffer_bytes / static_cast<int64_t>(sizeof(uint16_t));
  for (int64_t begin = 0; begin < call.rows * width; begin += piece) {
    const int64_t count = std::clamp<int64_t>(there - begin, 0, piece), meeting = ++*pointer<int64_t>(ranks.last_meeting);
    const SumCall sum{{ranks.segment, ranks.rank, ranks.ranks, ranks.buffer_bytes, meeting, ranks.patience_nanoseconds},
                      address(items + begin), count, sizeof(uint16_t)};
    if (const int64_t late = strata_ranks_sum(&sum)) return late;
  }
  return 0;
}

// hidden [tokens, width] -> out, which may be the same. As `strata_ranks_sum`.
int64_t run(const LayersCall& call, const Layer& layer, const uint16_t* hidden, uint16_t* out) {
  const Step& step = call.step;
  const int64_t tokens = step.tokens, width = layer.width, threads = step.threads;
  const int64_t queries = layer.query.rows(), keys = layer.key.rows(), inner = layer.gate.rows();
  const int64_t heads = queries / layer.head_width, kv_heads = keys / layer.head_width;
  uint16_t* at = pointer<uint16_t>(step.memory);
  const auto take = [&](int64_t columns) {
    uint16_t* taken = at;
    at += tokens * columns;
    return taken;
  };
  uint16_t *normed = take(width), *summed = take(width), *query = take(queries), *attended = take(queries), *key = take(keys), *value = take(keys),
           *unread = take(keys), *gate = take(inner), *up = take(inner);

  normalize(hidden, tokens, width, layer.norm, layer.epsilon, threads, normed);
  multiply(layer.query, normed, tokens, query, threads);
  multiply(layer.key, normed, tokens, key, threads);
  multiply(layer.value, normed, tokens, value, threads);
  place_in_order(step, layer, query, heads, layer.query_norm);
  place_in_order(step, layer, key, kv_heads, layer.key_norm);
  store(step, layer, key, kv_heads, layer.keys, layer.key_scales, unread);
  store(step, layer, value, kv_heads, layer.values, layer.value_scales, unread);
  attend(step, layer, query, heads, kv_heads, attended);
  multiply(layer.output, attended, tokens, summed, threads);
  if (const int64_t late = sum_over_ranks(call, summed, width)) return late;
  rowwise().add(hidden, summed, width, tokens, width, out);

  normalize(out, tokens, width, layer.attended_norm, layer.epsilon, threads, normed);
  multiply(layer.gate, normed, tokens, gate, threads);
  multiply(layer.up, normed, tokens, up, threads);
  const GateCall gated{address(gate), inner, address(up), inner, tokens, inner, address(gate), threads};
  strata_gate(&gated);
  multiply(layer.down, gate, tokens, summed, threads);
  if (const int64_t late = sum_over_ranks(call, summed, width)) return late;
  rowwise().add(out, summed, width, tokens, width, out);
  return 0;
}
#endif

}  // namespace

// Where the library multiplies bfloat16 (strata_dense_runs). As `strata_ranks_sum`.
STRATA_API int64_t strata_layers(const LayersCall* call) {
#if STRATA_X86
  auto hidden = pointer<const uint16_t>(call->hidden);
  const auto out = pointer<uint16_t>(call->out);
  for (int64_t place = 0; place < call->count; ++place) {
    __atomic_fetch_add(pointer<int64_t>(call->begun), 1, __ATOMIC_RELAXED);
    if (const int64_t late = run(*call, call->layers()[place], hidden, out)) return late;
    hidden = out;
  }
#else
  (void)call;
#endif
  return 0;
}
