-- Evaluation: rounds with their own tickets, each sampled by one policy version.
-- reads and writes: run (evaluated_version, evaluation_abandoned, claim_fence), fleet, fleet:status, evaluations, ledger
-- owns, only while a round is open:
--   eval:round      hash  version; total; opened_ms; started_ms, finished_ms: first volunteer, last result; fault
--   eval:tickets    hash  ticket -> body
--   eval:queue      zset  ticket without a result -> when it may be claimed, ms; below the clock of any server: now
--   eval:queue:rollouts zset  the same of tickets whose rollouts run in environments
--   eval:claims     hash  ticket -> "<member>|<fence>", the one that may submit
--   eval:claimed    hash  member -> "- <ordinal> <ticket> …", its last claim, to answer a repeated call
--   eval:failures   hash  ticket -> failures reported
--   eval:expiries   hash  ticket -> leases that expired
--   eval:volunteers zset  member that stays on the version -> when it was admitted, ms
--   eval:results    hash  ticket -> header
-- Tickets that are all known from the start need no stream: a queue by time gives the order of claims, their leases and the
-- remaining tickets, and leaves no consumers behind.

local QUEUES = {'queue', 'queue:rollouts'} -- of generators and of environments

local function part(prefix, name)
  return prefix .. ':eval:' .. name
end

local function owns(prefix, member, ticket, fence)
  return redis.call('HGET', part(prefix, 'claims'), ticket) == member .. '|' .. fence
end

local function alive(prefix, member, since)
  local heard = redis.call('ZSCORE', prefix .. ':fleet', member)
  return heard and tonumber(heard) >= since
end

-- Set the time from which a ticket without a result may be claimed, in whichever queue it is.
local function defer(prefix, ticket, until_ms)
  for _, queue in ipairs(QUEUES) do redis.call('ZADD', part(prefix, queue), 'XX', until_ms, ticket) end
end

local function queued(prefix, ticket)
  return redis.call('ZSCORE', part(prefix, QUEUES[1]), ticket) or redis.call('ZSCORE', part(prefix, QUEUES[2]), ticket)
end

local function hand_back(prefix, ticket)
  defer(prefix, ticket, 0)
  redis.call('HDEL', part(prefix, 'claims'), ticket)
  notify(prefix, 'evaluation')
end

-- Count a failure or an expiry of a ticket. At the limit the round can no longer be completed, and records why.
local function fails(prefix, counter, ticket, limit, reason)
  if redis.call('HINCRBY', part(prefix, counter), ticket, 1) < tonumber(limit) then return false end
  redis.call('HSETNX', part(prefix, 'round'), 'fault', 'ticket ' .. ticket .. ': ' .. reason)
  notify(prefix, 'evaluation')
  return true
end

-- Return how many generators keep training while `member` and the volunteers evaluate.
local function trainers_left(prefix, member, since)
  local left = 0
  for _, other in ipairs(redis.call('ZRANGE', prefix .. ':fleet', since, '+inf', 'BYSCORE')) do
    if other ~= member and not redis.call('ZSCORE', part(prefix, 'volunteers'), other) then
      local read, status = pcall(cjson.decode, redis.call('HGET', prefix .. ':fleet:status', other) or '')
      local training = read and type(status) == 'table' and status.kind == 'generator' and status.phase ~= 'draining'
      if training and type(status.world) == 'number' and status.world > 0 then left = left + 1 end
    end
  end
  return left
end

-- args: leader fence, version, then of each ticket its id, its body, and 1 if its rollouts run in an environment, otherwise 0.
-- Returns 1 if the round of `version` is open, now or by an earlier call; 0 if another is, or the version was handled before.
register_leader('eval_open', {'version', INTEGER, EACH, 'ticket', TEXT, 'body', TEXT, 'rollouts', NATURAL}, function(prefix, args)
  local version = redis.call('HGET', part(prefix, 'round'), 'version')
  if version then return version == args[2] and 1 or 0 end
  if tonumber(args[2]) <= (number(prefix, 'evaluated_version') or -1) then return 0 end
  local queues, bodies = {{}, {}}, {}
  for i = 3, #args, 3 do
    local queue = queues[args[i + 2] == '1' and 2 or 1]
    queue[#queue + 1], queue[#queue + 2] = i, args[i]
    bodies[#bodies + 1], bodies[#bodies + 2] = args[i], args[i + 1]
  end
  for i, queue in ipairs(queues) do call_over(queue, 'ZADD', part(prefix, QUEUES[i])) end
  call_over(bodies, 'HSET', part(prefix, 'tickets'))
  redis.call('HSET', part(prefix, 'round'), 'version', args[2], 'total', #bodies / 2, 'opened_ms', run_ms(prefix))
  redis.call('HSET', prefix .. ':run', 'evaluated_version', args[2])
  notify(prefix, 'evaluation')
  return 1
end, true)

-- args: leader fence, version, rounds. Counts the rounds up to `version`, which were due and can no longer be held, as skipped.
register_leader('eval_skip', {'version', INTEGER, 'rounds', NATURAL}, function(prefix, args)
  if tonumber(args[2]) <= (number(prefix, 'evaluated_version') or -1) then return 0 end
  redis.call('HSET', prefix .. ':run', 'evaluated_version', args[2])
  count(prefix, 'evaluations_skipped', args[3])
  return 1
end)

-- args: member, version it holds, fence of the trainer that sent it, ttl ms, max generators, min training generators. Returns 1
-- if the member must stay on these weights and evaluate, now or by an earlier call; otherwise 0, and it is no longer a volunteer.
register('eval_volunteer', {
  'member', TEXT, 'version', INTEGER, 'sender', NATURAL, 'ttl ms', NATURAL, 'max generators', NATURAL, 'min training', NATURAL,
}, function(prefix, args)
  local member, version, now = args[1], args[2], run_ms(prefix)
  local volunteers, since = part(prefix, 'volunteers'), now - tonumber(args[4])
  local run = redis.call('HMGET', prefix .. ':run', 'steps', 'stopping', 'finished', 'trainer_fence')
  local held = redis.call('HGET', part(prefix, 'round'), 'version') == version and run[4] == args[3]
  if not held or run[2] or run[3] then
    redis.call('ZREM', volunteers, member)
    return 0
  end
  if redis.call('ZSCORE', volunteers, member) then return 1 end
  local hopeless = redis.call('HEXISTS', part(prefix, 'round'), 'fault') == 1
  local served = redis.call('ZCARD', part(prefix, 'queue:rollouts')) -- their holders need a volunteer to sample
  if hopeless or redis.call('ZCOUNT', part(prefix, 'queue'), '-inf', now) + served == 0 then return 0 end
  if version ~= run[1] then -- after the last version there is nothing left to train
    local evaluating = 0
    for _, other in ipairs(redis.call('ZRANGE', volunteers, 0, -1)) do
      if alive(prefix, other, since) then evaluating = evaluating + 1 end
    end
    if evaluating >= tonumber(args[5]) or trainers_left(prefix, member, since) < tonumber(args[6]) then return 0 end
  end
  redis.call('ZADD', volunteers, now, member)
  redis.call('HSETNX', part(prefix, 'round'), 'started_ms', now)
  return 1
end)

-- Return the first element of a claim's reply: 2 if environments still hold or await tickets, otherwise 1.
local function still(prefix)
  return redis.call('ZCARD', part(prefix, 'queue:rollouts')) > 0 and 2 or 1
end

-- Return the reply to a claim whose first reply was lost: the tickets that it took, as far as they are still held.
local function claimed_again(prefix, member, tickets)
  local reply = {still(prefix)}
  for _, ticket in ipairs(tickets) do
    local holder, fence = string.match(redis.call('HGET', part(prefix, 'claims'), ticket) or '', '^(.*)|(%d+)$')
    if holder == member and queued(prefix, ticket) then
      for _, each in ipairs({ticket, fence, redis.call('HGET', part(prefix, 'tickets'), ticket)}) do reply[#reply + 1] = each end
    end
  end
  return reply
end

-- args: member, version, lease ms, count, max expiries, ordinal of the member's call, and 1 for tickets whose rollouts run in an
-- environment, which need no volunteer. Returns {1, ticket, fence, body, …}, with 2 in place of 1 while such tickets have no result,
-- so that volunteers stay; or {0} if this member has no part in an open round of the version; to a repeated call the same claims. A
-- call that comes after a later one claims nothing.
register('eval_claim', {
  'member', TEXT, 'version', INTEGER, 'lease ms', NATURAL, 'wanted', AMOUNT, 'max expiries', NATURAL,
  'ordinal', NATURAL, 'rollouts', NATURAL,
}, function(prefix, args)
  local member, now, queue = args[1], run_ms(prefix), part(prefix, QUEUES[args[7] == '1' and 2 or 1])
  local round = redis.call('HMGET', part(prefix, 'round'), 'version', 'fault')
  local run = redis.call('HMGET', prefix .. ':run', 'paused:generator', 'stopping', 'finished')
  if round[1] ~= args[2] or round[2] or run[2] or run[3] then return {0} end
  if args[7] ~= '1' and not redis.call('ZSCORE', part(prefix, 'volunteers'), member) then return {0} end
  if run[1] then return {still(prefix)} end
  local before = taken_before(part(prefix, 'claimed'), member, '-', args[6])
  if before then return claimed_again(prefix, member, before) end
  local found = redis.call('ZRANGE', queue, '-inf', now, 'BYSCORE', 'LIMIT', 0, args[4])
  local reply, fences = {still(prefix)}, next_fences(prefix, 'claim_fence', #found)
  for i, ticket in ipairs(found) do
    local held = redis.call('HEXISTS', part(prefix, 'claims'), ticket) == 1
    local reason = 'its lease expired ' .. args[5] .. ' times: it may crash its generator'
    if held and fails(prefix, 'expiries', ticket, args[5], reason) then return {0} end
    redis.call('ZADD', queue, now + tonumber(args[3]), ticket)
    redis.call('HSET', part(prefix, 'claims'), ticket, member .. '|' .. fences[i])
    reply[#reply + 1] = ticket
    reply[#reply + 1] = fences[i]
    reply[#reply + 1] = redis.call('HGET', part(prefix, 'tickets'), ticket)
  end
  record_taken(part(prefix, 'claimed'), member, '-', args[6], found)
  return reply
end)

-- args: member, lease ms, then ticket and fence of each. Renews the leases still held. Returns the tickets that are lost.
register('eval_renew', {'member', TEXT, 'lease ms', NATURAL, EACH, 'ticket', TEXT, 'fence', NATURAL}, function(prefix, args)
  local until_ms, lost = run_ms(prefix) + tonumber(args[2]), {}
  for i = 3, #args, 2 do
    if owns(prefix, args[1], args[i], args[i + 1]) then
      defer(prefix, args[i], until_ms)
    else
      lost[#lost + 1] = args[i]
    end
  end
  return lost
end)

-- args: member, ticket, fence, header. Returns 1 if accepted, now or by an earlier call of the same claim; 0 if the ticket was no
-- longer held.
register('eval_submit', {'member', TEXT, 'ticket', TEXT, 'fence', NATURAL, 'header', TEXT}, function(prefix, args)
  local member, ticket, fence, header = unpack(args)
  if not owns(prefix, member, ticket, fence) then return 0 end
  if redis.call('HSETNX', part(prefix, 'results'), ticket, header) == 1 then
    for _, queue in ipairs(QUEUES) do redis.call('ZREM', part(prefix, queue), ticket) end
    redis.call('HSET', part(prefix, 'round'), 'finished_ms', run_ms(prefix))
    notify(prefix, 'evaluation')
  end
  return 1
end, true)

-- args: member, ticket, fence, max attempts, reason. Hands a ticket back after a failure. Returns 1 if it failed too often, so
-- that the round must be abandoned; 0 if handed back; -1 if it was no longer held.
register('eval_fail', {
  'member', TEXT, 'ticket', TEXT, 'fence', NATURAL, 'max attempts', NATURAL, 'reason', TEXT,
}, function(prefix, args)
  local member, ticket, fence, limit, reason = unpack(args)
  if not owns(prefix, member, ticket, fence) then return -1 end
  if fails(prefix, 'failures', ticket, limit, reason) then return 1 end
  hand_back(prefix, ticket)
  return 0
end)

-- args: member, then ticket and fence of each that it hands back. The member no longer stays on a version.
register('eval_resign', {'member', TEXT, EACH, 'ticket', TEXT, 'fence', NATURAL}, function(prefix, args)
  for i = 2, #args, 2 do
    if owns(prefix, args[1], args[i], args[i + 1]) then hand_back(prefix, args[i]) end
  end
  return redis.call('ZREM', part(prefix, 'volunteers'), args[1])
end)

-- args: ttl ms. Returns {evaluated version, last round abandoned and why}, and of an open round also {version, total, results,
-- live volunteers, started ms, finished ms, now ms, fault}.
register('eval_look', {'ttl ms', NATURAL}, function(prefix, args)
  local run = redis.call('HMGET', prefix .. ':run', 'evaluated_version', 'evaluation_abandoned')
  local reply = {run[1] or '-1', run[2] or ''}
  local round = redis.call('HMGET', part(prefix, 'round'), 'version', 'total', 'started_ms', 'finished_ms', 'fault')
  if not round[1] then return reply end
  local volunteers, now = 0, run_ms(prefix)
  for _, member in ipairs(redis.call('ZRANGE', part(prefix, 'volunteers'), 0, -1)) do
    if alive(prefix, member, now - tonumber(args[1])) then volunteers = volunteers + 1 end
  end
  local results = redis.call('HLEN', part(prefix, 'results'))
  for _, value in ipairs({round[1], round[2], results, volunteers, round[3] or 0, round[4] or 0, now, round[5] or ''}) do
    reply[#reply + 1] = value
  end
  return reply
end)

-- args: leader fence, version, reason, record. Ends the round: with a record it is reported, without one it was abandoned for the
-- reason. Returns 1, or 0 if the round was ended before; either way none of its keys remain.
register_leader('eval_close', {'version', INTEGER, 'reason', TEXT, 'record', TEXT}, function(prefix, args)
  if redis.call('HGET', part(prefix, 'round'), 'version') ~= args[2] then return 0 end
  if args[4] ~= '' then
    redis.call('XADD', prefix .. ':evaluations', 'MAXLEN', '~', 10000, '*', 'm', args[4])
    count(prefix, 'evaluations', 1)
  else
    redis.call('HSET', prefix .. ':run', 'evaluation_abandoned', 'version ' .. args[2] .. ': ' .. args[3])
    count(prefix, 'evaluations_abandoned', 1)
  end
  for _, name in ipairs(EVALUATION_PARTS) do redis.call('UNLINK', part(prefix, name)) end
  notify(prefix, 'evaluation')
  return 1
end)
