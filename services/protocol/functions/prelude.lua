-- What all functions share. Every function takes one key, the run's prefix `grpo:{NAME}`, and builds names from it
-- as services/protocol/keys.py does. A function is atomic and one entry of the append-only file.

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function ring(prefix, topic)
  redis.call('PUBLISH', prefix .. ':bell', topic)
end

local function number(prefix, field)
  return tonumber(redis.call('HGET', prefix .. ':run', field))
end

-- The next `n` fencing numbers of a kind, as texts. None is ever given twice, not even by a server that lost its last second
-- in a crash: they start at the clock in µs, or after the last one where that is later.
local function next_fences(prefix, field, n)
  local time, fences = redis.call('TIME'), {}
  local first = math.max((number(prefix, field) or 0) + 1, tonumber(time[1]) * 1000000 + tonumber(time[2]))
  for i = 1, n do fences[i] = string.format('%.0f', first + i - 1) end
  if n > 0 then redis.call('HSET', prefix .. ':run', field, fences[n]) end
  return fences
end

-- One command with a list after its first arguments, in pieces that Lua's stack holds; returns the sum of the replies.
local function call_over(list, ...)
  local sum = 0
  for i = 1, #list, 1000 do
    local args = {...}
    for j = i, math.min(i + 999, #list) do args[#args + 1] = list[j] end
    sum = sum + redis.call(unpack(args))
  end
  return sum
end

local function count(prefix, field, by)
  redis.call('HINCRBY', prefix .. ':ledger', field, by)
end

local function free_slots(prefix, n)
  if n ~= 0 then
    redis.call('HINCRBY', prefix .. ':run', 'slots_used', -n)
    ring(prefix, 'slots')
  end
end

-- Nil when the caller holds the fencing number `field` of the run, else the refusal to return.
local function fenced(prefix, field, fence)
  if redis.call('HGET', prefix .. ':run', field) ~= fence then
    return redis.error_reply('FENCED ' .. field .. ' ' .. fence .. ' was superseded')
  end
end

-- A full server still takes what moves work on and so frees memory; only what adds to it (`grows`) is refused.
local function register(name, body, grows)
  redis.register_function{
    function_name = LIBRARY .. '_' .. name,
    callback = function(keys, args) return body(keys[1], args) end,
    flags = grows and {} or {'allow-oom'},
  }
end

-- The last 10,000 dead letters or a little more are kept: the ledger counts them all.
local function dead_letter(prefix, ticket, reason, body)
  redis.call('XADD', prefix .. ':deadletter', 'MAXLEN', '~', 10000, '*', 'ticket', ticket, 'reason', reason, 'body', body)
end

local function bury(prefix, ticket, reason, body)
  dead_letter(prefix, ticket, reason, body)
  count(prefix, 'failed', 1)
end
